// Elements, texts and numbers. Texts of models, data and configs become text nodes: no markup is ever parsed.

const find = (selector, root = document) => root.querySelector(selector);
const findAll = (selector, root = document) => [...root.querySelectorAll(selector)];

function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, text] of Object.entries(value)) element.style.setProperty(key, text);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  return element;
}

// An element with attributes (a function under `onclick`, an object under `style`) and children: nodes, texts, lists.
function el(tag, attributes = {}, ...children) {
  const element = setAttributes(document.createElement(tag), attributes);
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

// Replaces what an element contains.
function fill(element, ...children) {
  element.replaceChildren(
    ...children
      .flat(Infinity)
      .filter((child) => child !== null && child !== undefined && child !== false && child !== ""),
  );
}

function svg(tag, attributes = {}, ...children) {
  const element = setAttributes(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes);
  element.append(...children.flat(Infinity).filter(Boolean));
  return element;
}

// Control characters, marks that turn the direction of text, invisible characters, halves of surrogate pairs.
const INVISIBLE = new RegExp(
  "[\\u{0}-\\u{8}\\u{b}-\\u{1f}\\u{7f}-\\u{9f}\\u{ad}\\u{61c}\\u{180e}\\u{200b}\\u{200e}\\u{200f}\\u{2028}-\\u{202e}" +
    "\\u{2060}-\\u{206f}\\u{feff}\\u{fff9}-\\u{fffb}\\u{e0000}-\\u{e007f}]|\\p{Cs}",
  "gu",
);
const SHORT_ESCAPES = { "\r": "\\r", "\v": "\\v", "\f": "\\f", "\0": "\\0" };

function escapeOf(character) {
  const code = character.codePointAt(0);
  if (SHORT_ESCAPES[character]) return SHORT_ESCAPES[character];
  return code < 256
    ? "\\x" + code.toString(16).padStart(2, "0")
    : "U+" + code.toString(16).toUpperCase().padStart(4, "0");
}

// Nodes that show a text; invisible characters become visible escapes.
function shown(text) {
  const nodes = [];
  let end = 0;
  for (const match of String(text).matchAll(INVISIBLE)) {
    nodes.push(
      text.slice(end, match.index),
      el("span", { class: "escape", title: "an invisible character" }, escapeOf(match[0])),
    );
    end = match.index + match[0].length;
  }
  nodes.push(String(text).slice(end));
  return nodes;
}

// A text of foreign origin inside a line: its direction does not reach what stands around it.
const foreign = (text) => el("bdi", {}, shown(text));

const clean = (text) => String(text).replace(INVISIBLE, escapeOf);

// The first characters of a text on one line.
function excerpt(text, length) {
  const head = String(text)
    .slice(0, length * 2)
    .replace(/\s+/g, " ")
    .trim();
  return head.length > length || text.length > length * 2 ? head.slice(0, length) + "…" : head;
}

// A long text is shown in parts: each press of the button shows ten times as much, so that no text freezes the page.
const FIRST_PART = 4000;

function longText(text, className = "") {
  const body = el("span", { class: "text " + className, dir: "auto" });
  if (text === "") return el("div", { class: "block" }, el("em", { class: "quiet" }, "empty"));
  let end = Math.min(FIRST_PART, text.length);
  body.append(...shown(text.slice(0, end)));
  const block = el("div", { class: "block" }, body);
  if (end === text.length) return block;
  const label = () => `Show more (${count(end)} of ${count(text.length)} characters)`;
  const button = el("button", { type: "button", class: "small", "data-more": true }, label());
  button.addEventListener("click", () => {
    const next = Math.min(text.length, end * 10);
    body.append(...shown(text.slice(end, next)));
    end = next;
    if (end === text.length) button.remove();
    else button.textContent = label();
  });
  block.append(button);
  return block;
}

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const count = (value) => Number(value).toLocaleString("en-US");
const plural = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

// A number with at most `digits` significant digits.
function short(value, digits = 4) {
  if (!isNumber(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return count(value);
  const size = Math.abs(value);
  if (size >= 10 ** digits && size < 1e15) return count(Math.round(value));
  if (size < 1e-4 || size >= 1e15) return value.toExponential(Math.min(2, digits - 1)).replace("e+", "e");
  return String(Number(value.toPrecision(digits)));
}

const signed = (value, digits = 3) => (value > 0 ? "+" : "") + short(value, digits);

// Every digit, as in metrics.jsonl.
const full = (value) => (isNumber(value) ? String(value) : "–");

function announce(text) {
  find("#announce").textContent = text;
}

function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

// A control with its label above it.
function labelled(label, control, attributes = {}) {
  return el("label", { class: "field", ...attributes }, el("span", { class: "field-label" }, label), control);
}

function choices(values, selected, attributes = {}) {
  const options = values.map(([value, label]) =>
    el("option", { value, selected: String(value) === String(selected) }, clean(label)),
  );
  return el("select", attributes, options);
}

// CSV after RFC 4180. A text that a spreadsheet would read as a formula gets a leading apostrophe.
function csv(rows) {
  const cell = (value) => {
    if (value === null || value === undefined) return "";
    if (typeof value === "number") return String(value);
    const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : String(value);
    return /[",\r\n]/.test(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  };
  return rows.map((row) => row.map(cell).join(",") + "\r\n").join("");
}

function save(name, text, type = "text/csv") {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = el("a", { href: address, download: name.replace(/[^A-Za-z0-9._-]+/g, "_") });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// Pages opened from a file may not write to the clipboard: then the text is selected, ready for Ctrl-C.
async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
    announce("Copied");
    return true;
  } catch {
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    const copied = document.execCommand("copy");
    announce(copied ? "Copied" : "Selected: copy it with Ctrl-C");
    return copied;
  }
}

function copyButton(text, element) {
  const label = el("span", {}, "Copy");
  return button(
    label,
    async () => {
      label.textContent = (await copy(text, element)) ? "Copied" : "Selected";
      setTimeout(() => (label.textContent = "Copy"), 1500);
    },
    { class: "small" },
  );
}

function tableHead(cells) {
  return el(
    "thead",
    {},
    el(
      "tr",
      {},
      cells.map((cell) => el("th", { scope: "col" }, cell)),
    ),
  );
}

const tableRow = (cells) =>
  el(
    "tr",
    {},
    cells.map((cell) => el("td", {}, cell)),
  );

// A region that scrolls by itself, so that a wide table does not widen the page.
function scrollable(name, ...children) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": name }, children);
}

const NUMERIC = /^[-–]?[\d.,e]*( ± .*)?$/;

// Texts for the values of a column: its numbers have the same decimals.
function columnTexts(values) {
  const numbers = values.filter(isNumber);
  const largest = Math.max(1e-9, ...numbers.map(Math.abs));
  const most = Math.max(4, 3 - Math.floor(Math.log10(largest))); // four digits of the largest
  const decimals = Math.min(most, Math.max(0, ...numbers.map((value) => (short(value).split(".")[1] ?? "").length)));
  const tiny = numbers.some((value) => value !== 0 && Math.abs(value) < 1e-3) || decimals > 6;
  const fixed = { minimumFractionDigits: decimals, maximumFractionDigits: decimals };
  const text = (value) => (tiny ? short(value) : value.toLocaleString("en-US", fixed));
  return values.map((value) => (isNumber(value) ? text(value) : value === null ? "–" : String(value)));
}

// A table with headers that sort it. isStrong: whether a row stands out.
function sortableTable(table, caption, isStrong = () => false) {
  const texts = table.header.map((_, column) => columnTexts(table.rows.map((row) => row[column])));
  const numeric = texts.map((column, number) => number > 0 && column.every((text) => NUMERIC.test(text)));
  const kind = (column) => (numeric[column] ? "number" : null);
  const body = el("tbody");
  const headers = table.header.map((text, column) =>
    el(
      "th",
      { scope: "col", "aria-sort": "none", class: kind(column) },
      button(el("span", {}, foreign(text)), () => sortBy(column), { class: "sort" }),
    ),
  );
  const cell = (row, column) =>
    column === 0
      ? el("th", { scope: "row" }, foreign(texts[0][row]))
      : el("td", { class: kind(column) }, foreign(texts[column][row]));
  const rows = table.rows.map((row, number) =>
    el(
      "tr",
      { class: isStrong(row) ? "strong" : null },
      table.header.map((_, column) => cell(number, column)),
    ),
  );
  let order = { column: -1, up: true };
  function sortBy(column) {
    order = { column, up: order.column === column ? !order.up : true };
    const direction = order.up ? "ascending" : "descending";
    headers.forEach((header, number) => header.setAttribute("aria-sort", number === column ? direction : "none"));
    const value = (row) => table.rows[row][column];
    const sorted = rows.map((_, row) => row).sort((a, b) => compare(value(a), value(b)) * (order.up ? 1 : -1));
    fill(body, ...sorted.map((row) => rows[row]));
  }
  fill(body, ...rows);
  const name = el("caption", { class: "visually-hidden" }, caption);
  return scrollable(caption, el("table", { class: "sortable" }, name, el("thead", {}, el("tr", {}, headers)), body));
}

// Numbers and texts that begin with a number ("0.912 ± 0.01") in the order of the numbers, others as texts.
function compare(a, b) {
  const [x, y] = [a, b].map((value) => (isNumber(value) ? value : parseFloat(value)));
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return Number.isNaN(x) || x === y ? String(a).localeCompare(String(b), "en", { numeric: true }) : x - y;
}
