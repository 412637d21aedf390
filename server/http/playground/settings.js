// The settings of both forms. All but the access token survive a reload of the page, in this window only.

import { Refused } from "./calls.js";
import { $, make } from "./page.js";

const EXAMPLE = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Get the weather of a city",
      parameters: {
        type: "object",
        properties: { city: { type: "string", description: "Name of the city" } },
        required: ["city"],
      },
    },
  },
];
const CHOICES = ["auto", "required", "none"];

/** The fields of a request that both forms have. An empty field is left out: the server has a default. */
export function sampling() {
  const drafts = number("drafts");
  const speculation =
    drafts === undefined ? { mode: "auto" } : drafts ? { mode: "fixed", num_draft_tokens: drafts } : { mode: "off" };
  return {
    temperature: number("temperature"),
    top_p: number("top-p"),
    top_k: number("top-k"),
    // Drawn here, so that plain decoding can have the same one.
    seed: number("seed") ?? crypto.getRandomValues(new Uint32Array(1))[0],
    speculation: { ...speculation, verification: "coupled" },
    stream: true,
  };
}

/** The number in a field; undefined if the field is empty. */
export function number(id) {
  const { value, validity, labels } = $(id);
  const isTooLarge = id === "seed" && value !== "" && !Number.isSafeInteger(Number(value));
  if (validity?.badInput || isTooLarge) throw new Refused(`${labels[0].textContent} is not a number that fits.`);
  return value === "" ? undefined : Number(value);
}

/** The fields of a request with functions; {} without. */
export function toolFields() {
  const tools = functions();
  if (!tools.length) return {};
  const choice = $("tool-choice").value;
  const isNamed = !CHOICES.includes(choice);
  return { tools, tool_choice: isNamed ? { type: "function", function: { name: choice } } : choice };
}

function functions() {
  const text = $("tools").value.trim();
  if (!text) return [];
  try {
    const found = JSON.parse(text);
    return Array.isArray(found) ? found : [found];
  } catch (error) {
    throw new Refused(`The functions are not valid JSON: ${error.message}`);
  }
}

// Beside the general choices, each function can be required by its name.
function showChoices() {
  let names = [];
  try {
    names = functions().map((tool) => tool?.function?.name).filter((name) => name && !CHOICES.includes(name));
  } catch {
    // While it is typed it is seldom valid; the request says so.
  }
  const { value } = $("tool-choice");
  $("tool-choice").replaceChildren(...[...CHOICES, ...names].map((name) => make("option", {}, name)));
  $("tool-choice").value = [...CHOICES, ...names].includes(value) ? value : "auto";
}

/** Show the server's defaults, by the names of the request's fields, in fields that are empty. */
export function showDefaults(defaults) {
  for (const [name, value] of Object.entries(defaults)) {
    const field = $(name.replace("_", "-"));
    if (field) field.placeholder = `${value} (default)`;
  }
}

// --------------------------------------------------------------------------------------------------- kept in the window

export function recall(name) {
  return JSON.parse(sessionStorage.getItem(name));
}

export function remember(name, value) {
  try {
    sessionStorage.setItem(name, JSON.stringify(value));
  } catch {
    sessionStorage.removeItem(name); // it is too large: it will not survive a reload
  }
}

const kept = [...document.querySelectorAll("#settings :is(input, select, textarea), #prompt")].filter(
  ({ type }) => type !== "password",
);
const values = recall("settings") ?? {};
const fill = (fields) => fields.forEach((field) => (field.value = values[field.id] ?? field.value));
fill(kept);
showChoices();
fill([$("tool-choice")]);
for (const field of kept) {
  field.addEventListener("input", () => remember("settings", Object.fromEntries(kept.map(({ id, value }) => [id, value]))));
}
$("tools").addEventListener("input", showChoices);
$("example").addEventListener("click", () => {
  $("tools").value = JSON.stringify(EXAMPLE, null, 2);
  $("tools").dispatchEvent(new Event("input"));
});
