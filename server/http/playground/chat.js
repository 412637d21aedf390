// A conversation with a chat model, over /v1/chat/completions.

import { Refused, events } from "./calls.js";
import { Meter } from "./meter.js";
import { $, make, showError, showStatus } from "./page.js";
import { number, recall, remember, sampling, toolFields } from "./settings.js";
import { Answer, Question, Result, figuresOf, isSent } from "./turns.js";

const CLASSES = { user: Question, assistant: Answer, tool: Result };
const turns = [];
let running = null; // stops the current request

const opened = (kept) => new CLASSES[kept.role](kept, edit);

// ------------------------------------------------------------------------------------------------------------ requests

/** The fields of a request but its messages. */
function asked() {
  const tools = toolFields();
  // A call that is required again and again would never let the model use a result.
  if (tools.tools && tools.tool_choice !== "none" && turns.at(-1) instanceof Result) tools.tool_choice = "auto";
  return {
    system: $("system").value.trim(),
    ...sampling(),
    max_completion_tokens: number("max-tokens"),
    ...tools,
    return_tokens: true,
    return_speculation_stats: true,
  };
}

function body({ system, ...fields }, before) {
  const messages = before.map((turn) => turn.message);
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages, ...fields };
}

async function* choices(request, signal) {
  for await (const { choices: [choice] } of events("/v1/chat/completions", request, signal)) yield choice;
}

/** Do work(signal), which Stop and Esc end; its errors are shown in words. */
async function run(status, work) {
  if (running) return;
  const stop = (running = new AbortController());
  showError(null);
  showStatus(status);
  draw();
  try {
    await work(stop.signal);
    showStatus("");
  } catch (error) {
    showStatus(stop.signal.aborted ? "Stopped." : "");
    if (!stop.signal.aborted) showError(error);
    if (!stop.signal.aborted && !(error instanceof Refused)) throw error;
  } finally {
    running = null;
    followed(draw);
    remember("turns", turns);
  }
}

/** Let the model answer the last turn. */
function answer() {
  return run("Generating…", async (signal) => {
    const fields = asked();
    const request = body(fields, turns);
    const growing = new Answer({ asked: fields });
    turns.push(growing);
    draw();
    try {
      for await (const choice of choices(request, signal)) followed(() => growing.take(choice));
    } finally {
      if (growing.isEmpty && turns.includes(growing)) turns.splice(turns.indexOf(growing), 1);
      else if (!growing.kept.figures) growing.finish(signal.aborted ? "stopped" : "error");
    }
  });
}

/** Generate the last answer again by plain decoding: as many tokens, because it may have been stopped. */
function compare() {
  const last = turns.at(-1);
  const { asked: fields, figures } = last.kept;
  const request = body({ ...fields, max_completion_tokens: figures.ids.length }, turns.slice(0, -1));
  request.speculation = { mode: "off", verification: "coupled" };
  return run("Generating without drafts…", async (signal) => {
    const meter = new Meter();
    let text = "";
    for await (const { tokens } of choices(request, signal)) {
      if (!tokens) continue;
      meter.take(tokens);
      text += tokens.map((token) => token.text).join("");
    }
    followed(() => last.compare({ ...figuresOf(meter), text }));
  });
}

// -------------------------------------------------------------------------------------------------------------- turns

function send() {
  const content = $("message").value.trim();
  if (!content || running) return;
  $("message").value = "";
  turns.push(opened({ role: "user", content }));
  answer();
  scrollDown();
}

function edit(content) {
  if (running) return;
  turns.splice(turns.indexOf(this), turns.length, opened({ role: "user", content }));
  $("message").focus();
  answer();
}

function regenerate() {
  if (turns.at(-1) instanceof Answer) turns.pop();
  answer();
}

/** Answer the last turn if it has no answer, because of an error. */
export function tryAgain() {
  if (turns.length && !(turns.at(-1) instanceof Answer)) answer();
}

function restart() {
  running?.abort();
  turns.length = 0;
  remember("turns", turns);
  showError(null);
  showStatus("");
  draw();
  $("message").focus();
}

/** The calls of the last answer, whose results are missing. */
function openCalls() {
  const last = turns.at(-1);
  return last instanceof Answer && !running ? last.kept.calls : [];
}

function sendResults() {
  const fields = [...$("results").querySelectorAll("textarea")];
  openCalls().forEach(({ id, name }, i) => {
    turns.push(opened({ role: "tool", tool_call_id: id, name, content: fields[i].value }));
  });
  answer();
}

// ------------------------------------------------------------------------------------------------------------- display

function draw() {
  const elements = turns.map((turn) => turn.element);
  for (const child of [...$("log").children]) if (!elements.includes(child)) child.remove();
  elements.forEach((element, i) => {
    if ($("log").children[i] !== element) $("log").insertBefore(element, $("log").children[i] ?? null);
  });
  const isAnswered = turns.at(-1) instanceof Answer;
  $("log").ariaBusy = String(running !== null); // a screen reader reads the answer once it is whole
  document.body.classList.toggle("busy", running !== null);
  $("send").disabled = running !== null;
  $("stop").disabled = running === null;
  $("actions").hidden = running !== null || !turns.length;
  $("regenerate").textContent = isAnswered ? "Regenerate" : "Try again";
  $("plainly").hidden = !isAnswered;
  drawResults(openCalls());
}

function drawResults(calls) {
  $("results").hidden = !calls.length;
  $("results").replaceChildren(
    ...calls.map(({ id, name }) => {
      const field = make("textarea", { id: `result-${id}`, rows: 2, placeholder: '{"…": "…"}' });
      return make("div", { className: "field" }, make("label", { htmlFor: field.id }, `Result of ${name}`), field);
    }),
    make("div", { className: "buttons" }, make("button", { className: "main" }, "Send results")),
  );
}

/** Change the page, and keep its end in view if it was. */
function followed(change) {
  const { scrollHeight } = document.documentElement;
  const isAtEnd = scrollHeight - window.scrollY - window.innerHeight < 80;
  change();
  if (isAtEnd) scrollDown();
}

function scrollDown() {
  window.scrollTo(0, document.documentElement.scrollHeight);
}

// --------------------------------------------------------------------------------------------------------------- start

function onSubmit(form, work) {
  $(form).addEventListener("submit", (event) => {
    event.preventDefault();
    work();
  });
}

export function startChat() {
  turns.push(...(recall("turns") ?? []).map(opened));
  onSubmit("composer", send);
  onSubmit("results", sendResults);
  for (const [id, work] of Object.entries({ regenerate, plainly: compare, new: restart })) {
    $(id).addEventListener("click", work);
  }
  $("stop").addEventListener("click", () => running?.abort());
  $("message").addEventListener("keydown", (event) => isSent(event) && send());
  $("results").addEventListener("keydown", (event) => event.target.rows && isSent(event) && sendResults());
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  draw();
}
