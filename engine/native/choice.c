/* How many threads take part in a pass: as many as are fastest, by trial.
 *
 * The effect of one thread more or less depends on other users of the cores, which no thread can see. So a window of
 * passes is measured with another number, and the better one stays. A trial can cost time, and what it cost decides when
 * the next one may come: the loss is a bounded share of all time. No trial takes threads away where there is nothing to
 * gain: with fewer of them a pass saves at most the time in which its caller did not compute. */

#include "pool.h"

#define WINDOW 0.1  /* seconds of passes that are measured together: some ten slices of a scheduler's time */
#define GAIN 1.1    /* a number must be this much faster than another to take its place */
#define PRICE 100.0 /* seconds without a trial after one that lost a second */

/* The next number to try, or `home` if there is none. A step that failed is followed by the next larger one, since it may
 * take several threads more, or less, to make a difference; one that succeeded by its double. */
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
