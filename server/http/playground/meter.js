// Counts the tokens and passes of one output, and its speed.

export class Meter {
  constructor() {
    this.ids = [];
    this.numDrafts = 0;
    this.numPasses = 0;
    this.kept = 0; // accepted drafts of the pass that is not yet over
    this.firstAt = null;
  }

  /** Count the tokens of one event; onPass(kept) is called at the end of each pass. */
  take(tokens, onPass = () => {}) {
    this.lastAt = performance.now();
    if (this.firstAt === null) [this.firstAt, this.firstCount] = [this.lastAt, tokens.length];
    for (const token of tokens) {
      this.ids.push(token.id);
      if (token.from_draft) {
        this.numDrafts += 1;
        this.kept += 1;
      } else {
        // A pass ends with a token of the target's own.
        this.numPasses += 1;
        onPass(this.kept);
        this.kept = 0;
      }
    }
  }

  /** Passes so far, with one that an end cut before its last token. */
  get passes() {
    return this.numPasses + (this.kept > 0);
  }

  /** Seconds from the first event to the last, by this page's clock. */
  get seconds() {
    return this.firstAt === null ? 0 : (this.lastAt - this.firstAt) / 1000;
  }

  /** Tokens per second after the first event; null until it is known. */
  get speed() {
    return this.seconds > 0.05 ? (this.ids.length - this.firstCount) / this.seconds : null;
  }
}
