/* Read before all else by sources whose products are rounded before they are added to, as in torch: then the bits are the
 * same with any compiler. */

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
