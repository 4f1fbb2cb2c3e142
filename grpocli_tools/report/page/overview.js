// The head of the page: what ran, whether it learned, what to look at first, and the warnings.

const STATES = { running: "running", done: "done", stopped: "stopped", failed: "failed", unfinished: "unfinished" };
const LEVELS = ["good", "unclear", "bad"];

const stateWord = (name) => el("span", { class: `word state-${STATES[name] ? name : "unfinished"}` }, foreign(name));
const verdictWord = ({ level, word }) =>
  el("span", { class: `word verdict-${LEVELS.includes(level) ? level : "unclear"}` }, foreign(word));

function buildHeader() {
  const { data } = page;
  const heading = el(
    "div",
    { class: "title-row" },
    el("h1", {}, foreign(data.title)),
    page.runs.length === 1 ? stateWord(page.runs[0].state) : null,
    themeField(),
  );
  const content =
    page.runs.length === 0
      ? [el("p", { class: "quiet" }, data.live === null ? "No run." : "No step yet.")]
      : several()
        ? severalHeader()
        : runHeader(page.runs[0]);
  fill(find("#header"), heading, el("div", { id: "connection", role: "status" }), ...content, ...notes(data.notes));
  fill(
    find("#footer"),
    el(
      "p",
      { class: "quiet" },
      `grpocli ${data.version}`,
      data.made ? ` · made ${data.made}` : "",
      data.live === null ? " · this file loads nothing from a network" : " · live",
    ),
  );
  document.title = clean(data.title);
}

function runHeader(run) {
  return [noticeLine(run), verdictLine(run), progressLine(run), ...warningList([run]), facts(run), setup(run)].filter(Boolean);
}

// Why a run ended early, and the command that continues it.
function noticeLine(run) {
  if (!run.notice) return null;
  const command = el("code", {}, foreign(run.resume));
  return el(
    "div",
    { class: "notice" },
    el("p", {}, foreign(run.notice)),
    run.resume ? el("p", {}, "To continue it: ", command, " ", copyButton(run.resume, command)) : null,
  );
}

function verdictLine(run) {
  return el(
    "div",
    { class: "verdict" },
    el("p", {}, verdictWord(run.verdict), " ", foreign(run.verdict.text)),
    run.verdict.look ? el("p", { class: "look" }, lookFirst(run)) : null,
  );
}

const lookFirst = (run) => [
  /^look/i.test(run.verdict.look) ? null : el("strong", {}, "Look first: "),
  foreign(run.verdict.look),
];

function progressLine(run) {
  const last = run.steps[run.steps.length - 1] ?? 0;
  if (run.state !== "running" || run.total_steps <= 0) return null;
  return el(
    "p",
    { class: "row" },
    el("progress", { max: run.total_steps, value: last, "aria-label": "Steps" }),
    `step ${count(last)} of ${count(run.total_steps)}`,
  );
}

function severalHeader() {
  const verdicts = page.runs.map((run) => run.verdict);
  const words = [...new Map(verdicts.map((one) => [one.word, one])).values()].sort(
    (a, b) => LEVELS.indexOf(a.level) - LEVELS.indexOf(b.level),
  );
  return [
    el(
      "p",
      { class: "verdict" },
      plural(page.runs.length, "run"),
      ": ",
      words.map((one, at) => [
        at ? ", " : "",
        `${verdicts.filter(({ word }) => word === one.word).length} `,
        verdictWord(one),
      ]),
    ),
    ...warningList(page.runs),
  ];
}

// Warnings of one kind and text stand together, with the runs and steps that have them.
function warningList(runs) {
  const kinds = new Map();
  for (const run of runs) {
    for (const warning of run.warnings) {
      const key = several() ? warning.kind : `${warning.kind} ${warning.step}`;
      if (!kinds.has(key)) kinds.set(key, []);
      kinds.get(key).push([run, warning]);
    }
  }
  if (kinds.size === 0) return [];
  const items = [...kinds.values()].map((found) => (several() ? sharedWarning(found) : ownWarning(found[0][1])));
  const rest =
    items.length > 6
      ? el("details", {}, el("summary", {}, plural(items.length - 6, "more warning")), el("ul", {}, items.slice(6)))
      : null;
  return [
    el(
      "section",
      { class: "warnings", "aria-labelledby": "warnings-title" },
      el("h2", { id: "warnings-title" }, plural(items.length, "warning")),
      el("ul", {}, items.slice(0, 6)),
      rest,
    ),
  ];
}

function ownWarning(warning) {
  return el("li", {}, el("p", {}, stepLink(warning), " ", foreign(warning.text)), meaning(warning));
}

function sharedWarning(found) {
  const links = found.map(([run, warning]) =>
    el("li", {}, foreign(runLabel(run)), ": ", stepLink(warning), " ", foreign(warning.text)),
  );
  const [, first] = found[0];
  if (found.length === 1)
    return el("li", {}, links[0].childNodes.length ? el("p", {}, [...links[0].childNodes]) : null, meaning(first));
  return el(
    "li",
    {},
    el(
      "p",
      {},
      el("strong", {}, `${found.length} of ${plural(page.runs.length, "run")}: `),
      foreign(first.meaning),
      " ",
      el("span", { class: "advice" }, foreign(first.advice)),
    ),
    el("details", {}, el("summary", {}, "Which runs and steps"), el("ul", {}, links)),
  );
}

const meaning = (warning) =>
  el("p", { class: "quiet" }, foreign(warning.meaning), " ", el("span", { class: "advice" }, foreign(warning.advice)));

function stepLink(warning) {
  return button(`Step ${warning.step}`, () => showChart(warning.chart, warning.step), {
    class: "link",
    "data-warning": warning.kind,
  });
}

function facts(run) {
  const fact = ([label, value]) => el("div", {}, el("dt", {}, foreign(label)), el("dd", {}, foreign(value)));
  return el("dl", { class: "facts" }, run.facts.map(fact));
}

// Formula, command line and sessions: read once, so folded away.
function setup(run) {
  return el(
    "details",
    { class: "setup" },
    el("summary", {}, "Formula, command line, sessions"),
    run.formula.length ? objective(run) : null,
    commandLine(run),
    run.sessions.length ? sessionsTable(run) : null,
    el("p", { class: "quiet" }, "Folder: ", foreign(run.path)),
  );
}

function objective(run) {
  const text = foreign(run.formula.join("\n"));
  return [el("h2", {}, "Objective"), el("pre", { class: "formula", tabindex: "0", "aria-label": "Objective" }, text)];
}

function commandLine(run) {
  const command = ["grpocli train", ...run.overrides.map(shellWord)].join(" ");
  const block = el("pre", { tabindex: "0", "aria-label": "Command line" }, foreign(command));
  return [el("h2", {}, "Command line ", copyButton(command, block)), block];
}

function sessionsTable(run) {
  const rows = run.sessions.map((row) => tableRow(row.map(foreign)));
  const table = el("table", {}, tableHead(["Steps", "Started", "Versions and changes"]), el("tbody", {}, rows));
  return [el("h2", {}, "Sessions"), scrollable("Sessions", table)];
}

const shellWord = (text) => (/^[A-Za-z0-9_.\/=:,+@%-]+$/.test(text) ? text : "'" + text.replaceAll("'", "'\\''") + "'");

function runBody(run) {
  return [noticeLine(run), run.verdict.look ? el("p", {}, lookFirst(run)) : null, facts(run), setup(run)];
}

function themeField() {
  let saved = "";
  try {
    saved = localStorage.getItem("grpocli-colors") ?? "";
  } catch {
    /* no storage for this page */
  }
  const select = choices(
    [
      ["", "As the system"],
      ["light", "Light"],
      ["dark", "Dark"],
    ],
    saved,
    { id: "theme" },
  );
  select.addEventListener("change", () => {
    try {
      localStorage.setItem("grpocli-colors", select.value);
    } catch {
      /* no storage for this page */
    }
    applyTheme();
  });
  return labelled("Colors", select, { class: "field theme" });
}

function applyTheme(forced = null) {
  let saved = find("#theme")?.value;
  if (saved === undefined)
    try {
      saved = localStorage.getItem("grpocli-colors") ?? "";
    } catch {
      saved = "";
    }
  const theme = forced || saved || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  if (document.documentElement.dataset.theme === theme) return;
  document.documentElement.dataset.theme = theme;
  curves.charts.forEach((chart) => chart.redraw());
  curves.charts.forEach((chart) => chart.zoomTo(page.zoom));
}
