// A completion by a base model, beside plain decoding, over /generate.

import { Refused, events } from "./calls.js";
import { Meter } from "./meter.js";
import { $, counted, make, percent, piece, pieces, rounded, showError, showStatus } from "./page.js";
import { number, sampling } from "./settings.js";

const MAX_BARS = 120; // of the last passes
const LEAST_ROOM = 4; // drafts that a bar has room for before the scale of all bars changes
const ENDS = { stop: "a stop", length: "the maximum number of tokens" };
export const EMBEDDED = "pilotfish-embedded"; // the name of a model that has seen Python only
const CODE = `class Point:
    """A point in the plane."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
`;
const PROSE = "The three largest cities of France are";

const HINTS = {
  turns: "Runs one after the other, so that the speeds can be compared.",
  race: "Runs both in the same batch: plain decoding waits for the other’s drafts, so the gain is overestimated.",
  alone: "With drafts only; the gain is the server’s estimate.",
};

// ------------------------------------------------------------------------------------------------------- one side

class Side {
  constructor(id) {
    this.root = $(id);
    [this.speedText, this.passes, this.text, this.endText] = [".speed", ".passes", "pre", ".end"].map((name) =>
      this.root.querySelector(name),
    );
    this.clear("");
  }

  clear(prompt) {
    this.meter = new Meter();
    this.figures = null;
    this.text.replaceChildren(piece("asked", prompt));
    this.passes.replaceChildren();
    this.endText.textContent = "";
    this.speedText.textContent = "–";
  }

  take(event) {
    this.meter.take(event.tokens, (kept) => this.bar(kept));
    const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    let shown = "";
    for (const token of event.tokens) {
      this.text.append(...pieces(token.from_draft ? "draft" : "target", token.text));
      shown += token.text;
    }
    if (event.text !== shown) this.text.append(piece("target", event.text.slice(shown.length)));
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
    if (this.speed) this.speedText.textContent = rounded(this.speed);
  }

  bar(kept, isCut = false) {
    const bar = make("i");
    bar.style.setProperty("--kept", kept);
    scale.most = Math.max(scale.most, kept);
    $("outputs").style.setProperty("--most", scale.most);
    bar.classList.toggle("cut", isCut);
    this.passes.append(bar);
    if (this.passes.childElementCount > MAX_BARS) this.passes.firstElementChild.remove();
  }

  finish(figures) {
    this.figures = figures;
    if (this.meter.kept) this.bar(this.meter.kept, true);
    this.speedText.textContent = this.speed ? rounded(this.speed) : "–";
    const counts = `${counted(figures.completion_tokens, "token")} in ${counted(this.meter.passes, "pass")}`;
    const seconds = (figures.latency_ms / 1000).toFixed(2);
    this.endText.textContent = `${counts} and ${seconds} s, ended by ${ENDS[figures.finish_reason] ?? "an abort"}`;
  }

  // Tokens per second after the first: by the server's clock once it is known, by ours until then.
  get speed() {
    if (!this.figures) return this.meter.speed;
    const seconds = (this.figures.latency_ms - this.figures.time_to_first_token_ms) / 1000;
    return seconds > 0 ? (this.figures.completion_tokens - 1) / seconds : null;
  }
}

const scale = { most: LEAST_ROOM }; // one for both sides

// ----------------------------------------------------------------------------------------------------------- a run

const drafted = new Side("drafted");
const plain = new Side("plain");
let running = null; // stops the current run

async function generate(side, body, signal) {
  for await (const event of events("/generate", body, signal)) {
    if (event.tokens) side.take(event);
    else side.finish(event);
    showFigures();
  }
}

async function generateBoth(compare, withDrafts, signal) {
  const without = { ...withDrafts, speculation: { mode: "off", verification: "coupled" } };
  if (compare === "race") {
    showStatus("Generating concurrently…");
    return Promise.all([generate(drafted, withDrafts, signal), generate(plain, without, signal)]);
  }
  showStatus("Generating with drafts…");
  await generate(drafted, withDrafts, signal);
  if (compare === "alone") return;
  showStatus("Generating by plain decoding…");
  await generate(plain, without, signal);
}

async function run() {
  const [compare, stop] = [$("compare").value, new AbortController()];
  begin($("prompt").value, stop);
  try {
    const body = { prompt: $("prompt").value, ...sampling(), max_new_tokens: number("max-tokens") };
    await generateBoth(compare, body, stop.signal);
    showStatus(verdict(compare, body.seed));
  } catch (error) {
    const wasStopped = stop.signal.aborted;
    stop.abort(); // the other side's stream
    showStatus(wasStopped ? "Stopped." : "Failed.");
    if (!wasStopped) showError(error);
    if (!wasStopped && !(error instanceof Refused)) throw error;
  } finally {
    running = null;
    $("run").disabled = false;
    $("halt").disabled = true;
  }
}

function begin(prompt, stop) {
  running = stop;
  $("run").disabled = true;
  $("halt").disabled = false;
  showError(null);
  scale.most = LEAST_ROOM;
  drafted.clear(prompt);
  plain.clear(prompt);
  showFigures();
}

function verdict(compare, seed) {
  if (compare === "alone") return `Done, with seed ${seed}.`;
  const [ids, others] = [drafted.meter.ids, plain.meter.ids];
  const isSame = ids.length === others.length && ids.every((id, i) => id === others[i]);
  return isSame ? `The same text, token by token, with seed ${seed}.` : `The texts differ, with seed ${seed}.`;
}

// --------------------------------------------------------------------------------------------------------- figures

function showFigures() {
  const { meter, figures } = drafted;
  show("gain", gain(figures));
  show("per-pass", meter.passes ? (meter.ids.length / meter.passes).toFixed(2) : null);
  show("from-drafts", percent(meter.numDrafts, meter.ids.length));
  show("accepted", figures && percent(figures.accepted, figures.drafted));
}

function gain(figures) {
  if ($("compare").value === "alone") return figures && `${figures.gain.toFixed(2)}×`;
  return drafted.speed && plain.speed ? `${(drafted.speed / plain.speed).toFixed(2)}×` : null;
}

function show(id, value) {
  $(id).textContent = value ?? "–";
  $(id).classList.toggle("none", value === null);
}

function showComparison() {
  const compare = $("compare").value;
  $("compare-hint").textContent = HINTS[compare];
  plain.root.hidden = compare === "alone";
  $("outputs").classList.toggle("alone", compare === "alone");
}

// ----------------------------------------------------------------------------------------------------------- start

export function startCompletion(model) {
  $("prompt").value ||= model === EMBEDDED ? CODE : PROSE;
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) run();
  });
  $("halt").addEventListener("click", () => running?.abort());
  $("compare").addEventListener("change", showComparison);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") running?.abort();
    const isRun = event.key === "Enter" && (event.ctrlKey || event.metaKey) && !$("form").hidden;
    if (isRun) $("form").requestSubmit();
  });
  showComparison();
  showFigures();
}
