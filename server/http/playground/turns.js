// The turns of a conversation: what each sends to the server, and its element.

import { Meter } from "./meter.js";
import { button, counted, make, percent, pieces, rounded } from "./page.js";

const ENDS = {
  length: "cut at the maximum number of tokens",
  abort: "aborted by the server",
  error: "ended by an error",
  stopped: "stopped",
};

/** A turn of the user; edit(content) replaces it and all later ones. */
export class Question {
  constructor({ content }, edit) {
    this.content = content;
    this.edit = edit;
    this.element = make("article", { className: "turn user", ariaLabel: "You" });
    this.show();
  }

  get message() {
    return { role: "user", content: this.content };
  }

  show() {
    this.element.replaceChildren(
      make("div", { className: "text" }, this.content),
      make("div", { className: "buttons" }, copyButton(() => this.content), button("Edit", () => this.open())),
    );
  }

  open() {
    const field = make("textarea", { value: this.content, ariaLabel: "Edited message" });
    const save = () => field.value.trim() && this.edit(field.value.trim());
    field.addEventListener("keydown", (event) => {
      if (isSent(event)) save();
      if (event.key === "Escape") this.show();
    });
    const choices = [button("Save and answer", save), button("Cancel", () => this.show())];
    this.element.replaceChildren(field, make("div", { className: "buttons" }, ...choices));
    field.focus();
  }

  toJSON() {
    return this.message;
  }
}

/** The result of a call, as the user has typed it. */
export class Result {
  constructor({ content, name, tool_call_id }) {
    this.message = { role: "tool", tool_call_id, name, content };
    const ariaLabel = `Result of ${name}`;
    this.element = make("article", { className: "turn tool", ariaLabel }, folded(ariaLabel, content));
  }

  toJSON() {
    return this.message;
  }
}

/** An answer of the model, whole or still growing. Texts are kept as [kind, text] pairs, one for each token. */
export class Answer {
  constructor(kept) {
    this.kept = { role: "assistant", reasoning: [], content: [], calls: [], ...kept };
    this.meter = new Meter();
    this.origins = new Origins();
    this.text = new Text();
    this.calls = make("div", { className: "calls" });
    this.figures = make("p", { className: "figures" });
    this.compared = make("div", { className: "compared" });
    const copy = copyButton(() => textOf(this.kept.content));
    this.element = make(
      "article",
      { className: "turn assistant", ariaLabel: "Answer" },
      this.text.element,
      this.calls,
      make("div", { className: "buttons" }, copy, this.figures),
      this.compared,
    );
    this.showReasoning(this.kept.reasoning);
    this.text.append(this.kept.content);
    this.kept.calls.forEach((call) => this.showCall(call));
    this.showFigures();
    this.showComparison();
  }

  get isEmpty() {
    return !this.kept.reasoning.length && !this.kept.content.length && !this.kept.calls.length;
  }

  get message() {
    const { reasoning, content, calls } = this.kept;
    return {
      role: "assistant",
      content: textOf(content),
      reasoning_content: reasoning.length ? textOf(reasoning) : undefined,
      tool_calls: calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: textOf(call.arguments) },
      })),
    };
  }

  /** Add a chunk of the stream. */
  take({ delta, tokens = [], finish_reason, speculation_stats }) {
    if (tokens.length) this.meter.take(tokens);
    this.origins.add(tokens);
    const { reasoning, content, calls } = this.kept;
    if (delta.reasoning_content) {
      const runs = this.origins.of(delta.reasoning_content);
      reasoning.push(...runs);
      this.showReasoning(runs);
    }
    if (delta.content) {
      const runs = this.origins.of(delta.content);
      content.push(...runs);
      this.text.append(runs);
    }
    for (const call of delta.tool_calls ?? []) {
      if (call.id) {
        calls.push({ id: call.id, name: call.function.name, arguments: [] });
        this.showCall(calls.at(-1));
      }
      const runs = this.origins.of(call.function.arguments);
      calls[call.index].arguments.push(...runs);
      this.calls.children[call.index].querySelector("pre").append(...spansOf(runs));
    }
    if (finish_reason) this.finish(finish_reason, speculation_stats);
  }

  finish(reason, stats) {
    this.kept.figures = { ...figuresOf(this.meter), reason, drafted: stats?.drafted, accepted: stats?.accepted };
    this.showFigures();
  }

  compare(plain) {
    this.kept.plain = plain;
    this.showComparison();
  }

  showReasoning(runs) {
    if (!runs.length) return;
    if (!this.reasoning) {
      this.reasoning = folded("Reasoning", "");
      this.element.prepend(this.reasoning);
    }
    this.reasoning.querySelector("pre").append(...spansOf(runs));
  }

  showCall(call) {
    this.calls.append(folded(`Call of ${call.name}`, ...spansOf(call.arguments)));
  }

  showFigures() {
    const { figures } = this.kept;
    if (!figures) return;
    const parts = [
      `${counted(figures.ids.length, "token")} in ${counted(figures.passes, "pass")}`,
      figures.speed && `${rounded(figures.speed)} tokens/s`,
      figures.drafts && `${percent(figures.drafts, figures.ids.length)} from drafts`,
      figures.drafted && `${percent(figures.accepted, figures.drafted)} of drafts accepted`,
      ENDS[figures.reason],
    ];
    this.figures.textContent = parts.filter(Boolean).join(" · ");
  }

  showComparison() {
    const { figures, plain } = this.kept;
    if (!plain) return;
    const isSame = plain.ids.length === figures.ids.length && plain.ids.every((id, i) => id === figures.ids[i]);
    const isTimed = isSame && plain.speed && figures.speed;
    const gain = isTimed ? ` With drafts it was written ${(figures.speed / plain.speed).toFixed(2)} times as fast.` : "";
    this.compared.replaceChildren(
      make("p", {}, `${isSame ? "The same text, token by token." : "The texts differ."}${gain}`),
      table(["", "Passes", "After the first token", "Speed"], [
        ["With drafts", ...cells(figures)],
        ["Without drafts", ...cells(plain)],
      ]),
      folded("Text without drafts", plain.text),
    );
  }

  toJSON() {
    return this.kept;
  }
}

/** The text of an answer. Lines between fences (```) have letters of one width; nothing else is formatted. */
class Text {
  constructor() {
    this.element = this.block = make("div", { className: "text" });
    this.line = "";
  }

  append(runs) {
    for (const [kind, text] of runs) {
      for (const part of text.split(/(?=\n)/)) {
        const isEnd = part.startsWith("\n");
        const isFence = isEnd && this.line.trimStart().startsWith("```");
        if (isFence) this.toggle();
        this.block.append(...pieces(kind, isFence ? part.slice(1) : part));
        this.line = isEnd ? part.slice(1) : this.line + part;
      }
    }
  }

  toggle() {
    this.block.append("\n");
    this.block = this.block === this.element ? make("code") : this.element;
    if (this.block !== this.element) this.element.append(this.block);
  }
}

/** Which parts of the text were accepted drafts. Parts that are not shown, such as marks of a call, are skipped. */
class Origins {
  constructor() {
    this.text = "";
    this.ends = []; // of each token: [its end in the text, its kind]
    this.at = 0; // end of the text that has been shown
  }

  add(tokens) {
    for (const { text, from_draft } of tokens) {
      this.text += text;
      this.ends.push([this.text.length, from_draft ? "draft" : "target"]);
    }
  }

  /** The shown text as [kind, text] pairs; text that the model did not write literally has no colour. */
  of(shown) {
    const start = this.text.indexOf(shown, this.at);
    if (start < 0) return [["blank", shown]];
    this.at = start + shown.length;
    const runs = [];
    let from = start;
    while (this.ends.length && from < this.at) {
      const [end, kind] = this.ends[0];
      const until = Math.min(end, this.at);
      if (until > from) runs.push([kind, this.text.slice(from, until)]);
      from = Math.max(from, until);
      if (end > this.at) break;
      this.ends.shift();
    }
    return runs;
  }
}

/** What is kept of a meter. */
export function figuresOf(meter) {
  const { ids, passes, speed, seconds, numDrafts } = meter;
  return { ids, passes, speed, seconds, drafts: numDrafts };
}

/** Whether a key sends the text of a field: Enter, unless it ends a line or a word that is being composed. */
export function isSent(event) {
  const isSend = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (isSend) event.preventDefault();
  return isSend;
}

const textOf = (runs) => runs.map(([, text]) => text).join("");
const spansOf = (runs) => runs.flatMap(([kind, text]) => pieces(kind, text));
const cells = ({ passes, seconds, speed }) => [
  passes.toLocaleString("en"),
  speed ? `${seconds.toFixed(2)} s` : "–",
  speed ? `${rounded(speed)} tokens/s` : "–",
];

function folded(name, ...text) {
  return make("details", {}, make("summary", {}, name), make("pre", {}, ...text));
}

function table(head, rows) {
  const row = (tag, texts) => make("tr", {}, ...texts.map((text, i) => make(i ? tag : "th", {}, text)));
  return make("table", {}, make("thead", {}, row("th", head)), make("tbody", {}, ...rows.map((texts) => row("td", texts))));
}

function copyButton(text) {
  return button("Copy", async (pressed) => {
    await copy(text());
    pressed.textContent = "Copied";
    setTimeout(() => (pressed.textContent = "Copy"), 1500);
  });
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Over plain HTTP from another machine there is no clipboard; the older way needs a field.
    const field = make("textarea", { value: text });
    document.body.append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
}
