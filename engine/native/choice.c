/* Selects the number of threads of a pass: the fastest one, found by trials.
 *
 * The effect of one thread more or less depends on other users of the cores, which a process cannot measure. So the
 * passes of a window run with another number of threads, and the faster number is kept. The time that a trial loses
 * determines when the next one may start: the loss is a bounded share of all time. Fewer threads are tried only if that
 * can help: they save at most the time in which the calling thread did not compute. */

#include "pool.h"

#define WINDOW 0.1  /* seconds of passes per measurement: about ten time slices of the scheduler */
#define GAIN 1.1    /* a number must be this much faster to replace another */
#define PRICE 100.0 /* seconds without a trial, per second lost in the last one */

/* The next number to try, or `home` if there is none. A failed step is followed by the next larger one, since a
 * difference may require several threads more or fewer; a successful step by its double. */
static int other(Choice *c) {
  int fewer = c->home > 1 && c->lost > c->seconds * (1 - 1 / GAIN), room = fewer ? c->home - 1 : c->most - c->home;
  if (c->step > room) c->step = 1;
  return room ? fewer ? c->home - c->step : c->home + c->step : c->home;
}

static int restart(Choice *c) {
  c->seconds = c->work = c->lost = 0;
  return c->now;
}

int choose_threads(Choice *c, double clock, double seconds, double work, double lost) {
  c->seconds += seconds, c->work += work, c->lost += lost;
  if (c->seconds < WINDOW) return c->now;
  double rate = c->work / c->seconds;
  if (c->now != c->home) {
    if (rate > c->rate * GAIN) {
      c->home = c->now, c->rate = rate, c->due = clock, c->step *= 2;
    } else {
      double wasted = c->seconds - c->work / c->rate;
      c->due = clock + PRICE * (wasted > 0 ? wasted : 0);
      c->now = c->home, c->step++;
    }
    return restart(c);
  }
  c->rate = rate;
  if (clock >= c->due) c->now = other(c);
  return restart(c);
}
