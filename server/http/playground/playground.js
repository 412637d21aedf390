// One page, two streams of /generate. Nothing is stored, not even the token.

const $ = (id) => document.getElementById(id);
const MAX_BARS = 120; // of the last passes
const LEAST_ROOM = 4; // drafts that a bar has room for before the scale of all bars changes

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
    this.ids = [];
    this.numDrafts = 0;
    this.numPasses = 0;
    this.kept = 0; // drafts of the pass that is not yet over
    this.firstAt = null;
    this.figures = null;
    this.text.replaceChildren(piece("asked", prompt));
    this.passes.replaceChildren();
    this.endText.textContent = "";
    this.speedText.textContent = "–";
  }

  take(event) {
    const now = performance.now();
    if (this.firstAt === null) [this.firstAt, this.firstCount] = [now, event.tokens.length];
    this.lastAt = now;
    const isAtEnd = this.text.scrollHeight - this.text.scrollTop - this.text.clientHeight < 40;
    let shown = "";
    for (const token of event.tokens) {
      this.ids.push(token.id);
      this.text.append(...pieces(token.from_draft ? "draft" : "target", token.text));
      shown += token.text;
      this.count(token.from_draft);
    }
    if (event.text !== shown) this.text.append(piece("target", event.text.slice(shown.length)));
    if (isAtEnd) this.text.scrollTop = this.text.scrollHeight;
    if (this.speed) this.speedText.textContent = rounded(this.speed);
  }

  // A pass ends with a token of the target's own.
  count(fromDraft) {
    if (fromDraft) {
      this.numDrafts += 1;
      this.kept += 1;
    } else {
      this.numPasses += 1;
      this.bar(this.kept);
      this.kept = 0;
    }
  }

  bar(kept, isCut = false) {
    const bar = document.createElement("i");
    bar.style.setProperty("--kept", kept);
    scale.most = Math.max(scale.most, kept);
    $("outputs").style.setProperty("--most", scale.most);
    bar.classList.toggle("cut", isCut);
    this.passes.append(bar);
    if (this.passes.childElementCount > MAX_BARS) this.passes.firstElementChild.remove();
  }

  finish(figures) {
    this.figures = figures;
    if (this.kept) this.bar(this.kept, true); // the end cut the pass before its last token
    this.numPasses += this.kept > 0;
    this.speedText.textContent = this.speed ? rounded(this.speed) : "–";
    const seconds = figures.latency_ms / 1000;
    this.endText.textContent =
      `${figures.completion_tokens} tokens in ${this.numPasses} passes and ${seconds.toFixed(2)} s, ` +
      `ended by ${{ stop: "a stop", length: "the limit" }[figures.finish_reason] ?? "an abort"}`;
  }

  // Tokens per second after the first: by the server's clock once it is known, by ours until then.
  get speed() {
    if (this.figures) {
      const seconds = (this.figures.latency_ms - this.figures.time_to_first_token_ms) / 1000;
      return seconds > 0 ? (this.figures.completion_tokens - 1) / seconds : null;
    }
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return this.firstAt !== null && seconds > 0.05 ? (this.ids.length - this.firstCount) / seconds : null;
  }
}

const scale = { most: LEAST_ROOM }; // one for both sides

// Indentation is not coloured, because long bars would hide the words.
function pieces(kind, text) {
  const [indentation] = /^\s*\n[ \t]*/.exec(text) ?? [""];
  return [piece("blank", indentation), piece(kind, text.slice(indentation.length))].filter((span) => span.textContent);
}

function piece(kind, text) {
  const span = document.createElement("span");
  span.className = kind;
  span.textContent = text;
  return span;
}

const rounded = (value) => (value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : null);

// --------------------------------------------------------------------------------------------------------- calls

class Refused extends Error {}

async function* events(body, signal) {
  const headers = { "Content-Type": "application/json" };
  const token = $("token").value.trim();
  if (token) headers.Authorization = `Bearer ${token}`;
  const answer = await fetch("/generate", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) throw await refusal(answer);
  let rest = "";
  for await (const chunk of decoded(answer.body)) {
    const parts = (rest + chunk).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(event.error.message);
      yield event;
    }
  }
  throw new Refused("The stream ended unexpectedly.");
}

async function* decoded(stream) {
  const [reader, decoder] = [stream.getReader(), new TextDecoder()];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield decoder.decode(value, { stream: true });
  }
}

async function refusal(answer) {
  let said = answer.statusText;
  try {
    said = (await answer.json()).error.message;
  } catch {
    // Possibly a proxy's answer, of which only the status is shown.
  }
  if (answer.status === 401) {
    $("access").open = true;
    $("token").focus();
  }
  return new Refused(`${answer.status}: ${said}`);
}

// ----------------------------------------------------------------------------------------------------------- a run

const drafted = new Side("drafted");
const plain = new Side("plain");
let running = null; // stops the current run

function asked() {
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const drafts = number("drafts");
  // One seed for both sides: the same text has to come of it.
  const seed = number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0];
  const body = {
    prompt: $("prompt").value,
    max_new_tokens: number("max-tokens"),
    temperature: number("temperature"),
    top_p: number("top-p"),
    seed,
    stream: true,
  };
  const speculation = drafts ? { mode: "fixed", num_draft_tokens: drafts } : { mode: "auto" };
  return {
    withDrafts: { ...body, speculation: { ...speculation, verification: "coupled" } },
    without: { ...body, speculation: { mode: "off", verification: "coupled" } },
  };
}

async function generate(side, body, signal) {
  for await (const event of events(body, signal)) {
    if (event.tokens) side.take(event);
    else side.finish(event);
    showFigures();
  }
}

async function run() {
  const [{ withDrafts, without }, compare, stop] = [asked(), $("compare").value, new AbortController()];
  begin(withDrafts.prompt, stop);
  try {
    if (compare === "race") {
      showStatus("Generating concurrently…");
      await Promise.all([generate(drafted, withDrafts, stop.signal), generate(plain, without, stop.signal)]);
    } else {
      showStatus("Generating with drafts…");
      await generate(drafted, withDrafts, stop.signal);
      if (compare === "turns") {
        showStatus("Generating by plain decoding…");
        await generate(plain, without, stop.signal);
      }
    }
    showStatus(verdict(compare, withDrafts.seed));
  } catch (error) {
    const wasStopped = stop.signal.aborted;
    stop.abort(); // the other side's stream
    showStatus(wasStopped ? "Stopped." : "Failed.");
    if (!wasStopped) fail(error);
  } finally {
    running = null;
    $("run").disabled = false;
    $("stop").disabled = true;
  }
}

function begin(prompt, stop) {
  running = stop;
  $("run").disabled = true;
  $("stop").disabled = false;
  $("error").hidden = true;
  scale.most = LEAST_ROOM;
  drafted.clear(prompt);
  plain.clear(prompt);
  showFigures();
}

function verdict(compare, seed) {
  if (compare === "alone") return `Done, with seed ${seed}.`;
  const isSame = drafted.ids.length === plain.ids.length && drafted.ids.every((id, i) => id === plain.ids[i]);
  return isSame ? `The same text, token by token, with seed ${seed}.` : `The texts differ, with seed ${seed}.`;
}

function fail(error) {
  const isOurs = error instanceof Refused;
  $("error").textContent = isOurs ? error.message : `The server cannot be reached: ${error.message}`;
  $("error").hidden = false;
}

function showStatus(text) {
  $("status").textContent = text;
}

// --------------------------------------------------------------------------------------------------------- figures

function showFigures() {
  const { ids, numDrafts, numPasses, kept, figures } = drafted;
  const passes = numPasses + (figures === null && kept > 0);
  show("gain", gain(figures));
  show("per-pass", passes ? (ids.length / passes).toFixed(2) : null);
  show("from-drafts", percent(numDrafts, ids.length));
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

// ---------------------------------------------------------------------------------------------------------- server

async function lookForServer() {
  try {
    const health = await (await fetch("/health")).json();
    const models = [health.model, health.draft_model && `drafts by ${health.draft_model}`, health.device];
    $("server").textContent = health.model
      ? models.filter(Boolean).join(" · ")
      : `The server is ${health.status}: ${health.progress ?? "no model yet"}`;
    if (health.status === "starting") setTimeout(lookForServer, 1000);
  } catch {
    $("server").textContent = "The server cannot be reached.";
  }
}

function showComparison() {
  const compare = $("compare").value;
  $("compare-hint").textContent = HINTS[compare];
  plain.root.hidden = compare === "alone";
  $("outputs").classList.toggle("alone", compare === "alone");
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) run();
});
$("stop").addEventListener("click", () => running?.abort());
$("compare").addEventListener("change", showComparison);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) $("form").requestSubmit();
});
showComparison();
showFigures();
lookForServer();
