/* Included first by sources whose products are rounded before they are added, as in torch: then the bits do not depend
 * on the compiler. */

#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=off")
#endif
