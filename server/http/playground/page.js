// What both forms share: elements, words and coloured pieces of text.

export const $ = (id) => document.getElementById(id);

/** An element with properties and children: make("button", { type: "button" }, "Copy"). */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function button(name, work) {
  const element = make("button", { type: "button" }, name);
  element.addEventListener("click", () => work(element));
  return element;
}

export function piece(kind, text) {
  return make("span", { className: kind }, text);
}

/** The spans of a token. Indentation is not coloured, because long bars would hide the words. */
export function pieces(kind, text) {
  const [indentation] = /^\s*\n[ \t]*/.exec(text) ?? [""];
  return [piece("blank", indentation), piece(kind, text.slice(indentation.length))].filter((span) => span.textContent);
}

export const rounded = (value) => (value < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en"));
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : null);

/** counted(1, "pass") -> "1 pass", counted(2, "pass") -> "2 passes". */
export function counted(number, noun) {
  const plural = noun.endsWith("s") ? `${noun}es` : `${noun}s`;
  return `${number.toLocaleString("en")} ${number === 1 ? noun : plural}`;
}

export function showStatus(text) {
  $("status").textContent = text;
}

/** Show an error in words; null removes it. */
export function showError(error) {
  $("error").textContent = error?.message ?? "";
  $("error").hidden = error === null;
}
