// Starts the page: a chat if the model has a chat template, else a completion.

import { headers } from "./calls.js";
import { startChat, tryAgain } from "./chat.js";
import { EMBEDDED, startCompletion } from "./completion.js";
import { $ } from "./page.js";
import { recall, remember, showDefaults } from "./settings.js";

const FORMS = ["chat", "completion"];
// Of the fields that a request leaves out.
const DEFAULTS = {
  chat: { temperature: 1, top_p: 1, top_k: 0, max_tokens: "no limit" },
  completion: { temperature: 0, top_p: 1, top_k: 0, max_tokens: 128 },
};

async function lookForServer() {
  try {
    const health = await (await fetch("/health")).json();
    if (health.model) return start(health);
    $("server").textContent = `The server is ${health.status}: ${health.progress ?? "no model yet"}`;
    setTimeout(lookForServer, 1000);
  } catch (error) {
    $("server").textContent = "The server cannot be reached.";
    throw error;
  }
}

function start(health) {
  const models = [health.model, health.draft_model && `drafts by ${health.draft_model}`, health.device];
  $("server").textContent = models.filter(Boolean).join(" · ");
  startChat();
  startCompletion(health.model);
  for (const form of FORMS) $(form).addEventListener("click", () => show(form));
  $("token").addEventListener("change", lookForDefaults);
  $("settings").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.target.tagName !== "INPUT") return;
    if (recall("form") === "chat") tryAgain();
    else $("form").requestSubmit();
  });
  $("forms").hidden = !health.has_chat_template;
  const isChat = health.has_chat_template && health.model !== EMBEDDED; // which completes code only
  show((health.has_chat_template && recall("form")) || (isChat ? "chat" : "completion"));
  lookForDefaults();
}

function show(shown) {
  remember("form", shown);
  for (const form of FORMS) {
    for (const element of document.querySelectorAll(`.${form}`)) element.hidden = form !== shown;
    $(form).ariaPressed = String(form === shown);
  }
  showDefaults(DEFAULTS[shown]);
  window.scrollTo(0, shown === "chat" ? document.documentElement.scrollHeight : 0);
  $(shown === "chat" ? "message" : "prompt").focus({ preventScroll: true });
}

/** Look for the defaults that the checkpoint has for a chat. They are not found while a token is missing. */
async function lookForDefaults() {
  const answer = await fetch("/v1/models", { headers: headers() });
  const [model] = answer.ok ? (await answer.json()).data : [];
  Object.assign(DEFAULTS.chat, model?.default_sampling_params);
  showDefaults(DEFAULTS[recall("form")]);
}

if (matchMedia("(max-width: 60rem)").matches) $("settings").open = false;
lookForServer();
