// The rollouts: filters, a paged list of completions, and beside it the group that is open.

const rollouts = { entries: null, found: [], panel: null, shownPage: 0, loaded: new Set() };
const PAGE_SIZE = 50;
const SORTS = {
  newest: ["Newest step first", (a, b) => b.group.step - a.group.step],
  oldest: ["Oldest step first", (a, b) => a.group.step - b.group.step],
  best: ["Highest reward first", (a, b) => order(b.completion.reward, a.completion.reward)],
  worst: ["Lowest reward first", (a, b) => order(a.completion.reward, b.completion.reward)],
  advantage: [
    "Largest advantage first",
    (a, b) => order(Math.abs(b.completion.advantage ?? 0), Math.abs(a.completion.advantage ?? 0)),
  ],
  longest: ["Longest first", (a, b) => b.completion.length - a.completion.length],
  shortest: ["Shortest first", (a, b) => a.completion.length - b.completion.length],
};
const FILTERS = ["from", "to", "task", "q", "status", "finish", "adv", "run"];

const order = (a, b) => (a ?? -Infinity) - (b ?? -Infinity);

// The embedded completions, read when they are first needed.
function loadRollouts() {
  if (rollouts.entries) return;
  const { prompts, groups } = JSON.parse(find("#rollouts").textContent);
  page.prompts = [...prompts, ...(page.data.prompts ?? [])];
  rollouts.entries = [];
  for (const run of page.runs) {
    run.groups = [];
    addGroups(run, [...(groups[run.id] ?? []), ...run.rollouts.groups]);
  }
}

function addGroups(run, groups) {
  for (const group of groups) {
    run.groups.push(group);
    group.completions.forEach((completion, at) =>
      rollouts.entries.push({ run, group, completion, at, prompt: page.prompts[group.prompt] }),
    );
  }
}

function buildRollouts(panel) {
  if (document.readyState === "loading")
    return document.addEventListener("DOMContentLoaded", () => buildPanel("rollouts"));
  rollouts.panel = panel;
  loadRollouts();
  reading.measure = state.color ?? "none";
  reading.marks = state.marks === "1";
  const status = el("p", { id: "found", role: "status" });
  fill(
    panel,
    el("h2", { class: "visually-hidden" }, "Rollouts"),
    ...ruleNotes(),
    filterForm(),
    el("p", { id: "loaded", class: "quiet", role: "status" }),
    status,
    el(
      "div",
      { class: "reader" },
      el(
        "div",
        { class: "list-side" },
        el("ul", { id: "list", "aria-label": "Completions" }),
        el("div", { class: "pager", id: "pager" }),
      ),
      el("div", { id: "group", tabindex: "-1", role: "region", "aria-label": "The open group" }),
    ),
  );
  applyFilters();
  drawGroup();
}

// The sentences that say which completions the page has. Those of runs with one rule are one sentence.
function ruleNotes() {
  const sums = new Map();
  for (const { rollouts: sample } of page.runs) {
    const parts = /^([\d,]+) of ([\d,]+) (completions: .*)$/s.exec(sample.rule);
    const [shown, total, rule] = parts ? parts.slice(1) : ["0", "0", sample.rule];
    const before = sums.get(rule) ?? [0, 0];
    sums.set(rule, [before[0] + inDigits(shown), before[1] + inDigits(total)]);
  }
  const sentences = [...sums].filter(([rule]) => rule !== "");
  return sentences.map(([rule, [shown, total]]) =>
    el("p", { class: "quiet rule" }, foreign(total > 0 ? `${count(shown)} of ${count(total)} ${rule}` : rule)),
  );
}

const inDigits = (text) => Number(text.replaceAll(",", ""));

const distinct = (of) =>
  [...new Set(rollouts.entries.map(of))]
    .filter((value) => value !== null && value !== undefined && value !== "")
    .sort();
const withAny = (values, names = {}) => [["", "Any"], ...values.map((value) => [value, names[value] ?? value])];

// The values of the loaded completions that a filter offers.
function filterChoices() {
  return {
    rewards: [...new Set(rollouts.entries.flatMap((entry) => Object.keys(entry.completion.rewards)))].sort(),
    tasks: distinct((entry) => entry.prompt.task),
    finishes: distinct((entry) => entry.completion.finish),
    statuses: distinct((entry) => entry.completion.status),
  };
}

function filterForm() {
  const { rewards, tasks, finishes, statuses } = filterChoices();
  const labels = Object.fromEntries(page.runs.map((run) => [run.id, runLabel(run)]));
  const runs = page.runs.map((run) => run.id);
  const parts = {
    steps: range("Steps", filterNumber("from", "from"), filterNumber("to", "to")),
    run: several() ? filterSelect("run", "Run", withAny(runs, labels)) : null,
    task: tasks.length > 1 ? filterSelect("task", "Task", withAny(tasks)) : null,
    text: filterText(),
    adv: filterSelect("adv", "Advantage", withAny(["positive", "negative", "zero"])),
    finish: filterSelect("finish", "Finish reason", withAny(finishes)),
    status: filterSelect("status", "Status", withAny(statuses)),
    ...Object.fromEntries(rewards.map((name) => [`reward ${name}`, rewardRange(name)])),
    order: filterSelect(
      "sort",
      "Order",
      Object.entries(SORTS).map(([key, [label]]) => [key, label]),
    ),
    clear: button("Clear filters", clearFilters),
  };
  const shown = Object.entries(parts).filter(([, part]) => part !== null);
  for (const [name, part] of shown) part.dataset.part = name;
  const submitted = (event) => event.preventDefault();
  const children = shown.map(([, part]) => part);
  return el("form", { class: "bar filters", "aria-label": "Filters", onsubmit: submitted }, children);
}

// New completions may bring new rewards and finish reasons. The part that the reader is typing in stays as it is.
function refreshFilters() {
  const form = find(".filters", rollouts.panel);
  for (const part of [...filterForm().children]) {
    const known = find(`:scope > [data-part="${CSS.escape(part.dataset.part)}"]`, form);
    if (!known) form.insertBefore(part, find('[data-part="order"]', form));
    else if (!known.contains(document.activeElement)) known.replaceWith(part);
  }
}

const filterChanged = (key) => (event) => filter(key, event.target.value);

function filterSelect(key, label, values) {
  const selected = state[key] ?? (key === "sort" ? "newest" : "");
  return labelled(label, choices(values, selected, { "data-filter": key, onchange: filterChanged(key) }));
}

function filterNumber(key, label, step = 1) {
  const value = state[key] ?? "";
  return labelled(label, el("input", { type: "number", step, value, "data-filter": key, oninput: filterChanged(key) }));
}

function filterText() {
  const value = state.q ?? "";
  const input = el("input", { type: "search", value, "data-filter": "q", oninput: filterChanged("q") });
  return labelled("Prompt or completion contains", input, { class: "field wide" });
}

const rewardRange = (name) =>
  range(name, filterNumber(`min.${name}`, "from", "any"), filterNumber(`max.${name}`, "to", "any"));

function range(name, ...fields) {
  return el(
    "div",
    { class: "range", role: "group", "aria-label": clean(name) },
    el("div", { class: "field-label" }, foreign(name)),
    el("div", { class: "row" }, fields),
  );
}

function filter(key, value) {
  setState({ [key]: value });
}

const isFilter = (key) => FILTERS.includes(key) || key === "sort" || key.startsWith("min.") || key.startsWith("max.");

function clearFilters() {
  setState(
    Object.fromEntries(
      Object.keys(state)
        .filter((key) => isFilter(key) && key !== "sort")
        .map((key) => [key, ""]),
    ),
    true,
  );
}

function showFilters() {
  for (const control of findAll("[data-filter]", rollouts.panel)) {
    const value = state[control.dataset.filter] ?? (control.dataset.filter === "sort" ? "newest" : "");
    if (control.value !== value) control.value = value;
  }
}

// The number in a filter, or null.
function bound(key) {
  const text = state[key] ?? "";
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : null;
}

// A function that says whether an entry passes all filters.
function filterTest() {
  const [from, to] = [bound("from"), bound("to")];
  const words = (state.q ?? "").toLowerCase();
  const ranges = Object.keys(state)
    .filter((key) => /^(min|max)\./.test(key) && bound(key) !== null)
    .map((key) => [
      key.slice(4),
      key.startsWith("min")
        ? (value) => isNumber(value) && value >= bound(key)
        : (value) => isNumber(value) && value <= bound(key),
    ]);
  const sign = { positive: (value) => value > 0, negative: (value) => value < 0, zero: (value) => value === 0 }[
    state.adv
  ];
  return ({ run, group, completion, prompt }) =>
    (from === null || group.step >= from) &&
    (to === null || group.step <= to) &&
    (!state.run || run.id === state.run) &&
    (!state.task || prompt.task === state.task) &&
    (!state.status || completion.status === state.status) &&
    (!state.finish || completion.finish === state.finish) &&
    (!sign || (isNumber(completion.advantage) && sign(completion.advantage))) &&
    ranges.every(([name, holds]) => holds(completion.rewards[name])) &&
    (words === "" || prompt.text.toLowerCase().includes(words) || completion.text.toLowerCase().includes(words));
}

function applyFilters() {
  if (!rollouts.panel) return;
  rollouts.found = rollouts.entries.filter(filterTest());
  rollouts.found.sort((SORTS[state.sort] ?? SORTS.newest)[1]);
  rollouts.shownPage = 0;
  drawList();
}

function drawList() {
  const { found } = rollouts;
  const pages = Math.max(1, Math.ceil(found.length / PAGE_SIZE));
  rollouts.shownPage = Math.min(rollouts.shownPage, pages - 1);
  const start = rollouts.shownPage * PAGE_SIZE;
  const status = find("#found");
  status.dataset.count = found.length;
  status.textContent = `${plural(found.length, "completion")} of ${count(rollouts.entries.length)}`;
  fill(find("#list"), ...found.slice(start, start + PAGE_SIZE).map(listRow));
  const turn = (by) => () => {
    rollouts.shownPage += by;
    drawList();
    find("#list").scrollTop = 0;
  };
  fill(
    find("#pager"),
    button("Previous", turn(-1), { disabled: rollouts.shownPage === 0 }),
    el("span", {}, `Page ${rollouts.shownPage + 1} of ${count(pages)}`),
    button("Next", turn(1), { disabled: rollouts.shownPage >= pages - 1 }),
  );
}

/** A completion's text in one line; the turns of an episode are separated. */
function lineOf(completion) {
  return completion.episode?.map((turn) => turn.content).join(" · ") ?? completion.text;
}

function listRow(entry) {
  const { run, group, completion, prompt } = entry;
  const key = groupKey(run, group);
  return el(
    "li",
    {},
    button(
      [
        el(
          "span",
          { class: "row-texts" },
          el("span", { class: "excerpt quiet" }, foreign(excerpt(lastUser(prompt), 90))),
          el("span", { class: "excerpt" }, foreign(excerpt(lineOf(completion), 140) || "(empty)")),
        ),
        el(
          "span",
          { class: "row-numbers" },
          `step ${group.step}`,
          several() ? [" · ", swatch(run.color, run.dash), foreign(runLabel(run))] : null,
          ` · reward ${short(completion.reward)}`,
          isNumber(completion.advantage) ? ` · advantage ${signed(completion.advantage)}` : "",
          " · ",
          foreign(completion.finish),
          /^(longest|shortest)$/.test(state.sort ?? "") ? ` · ${plural(completion.length, "token")}` : "",
        ),
      ],
      () => openGroup(run, group, entry.at),
      {
        class: "list-row",
        "data-group": key,
        "data-at": entry.at,
        "aria-current": state.group === key && state.at === String(entry.at) ? "true" : null,
      },
    ),
  );
}

// What distinguishes a prompt: its last message, since the first is often the same system prompt.
function lastUser(prompt) {
  return prompt.messages?.length ? (prompt.messages[prompt.messages.length - 1].content ?? "") : prompt.text;
}

const groupKey = (run, group) => `${run.id}~${group.step}~${group.group}`;

function openGroup(run, group, at = "") {
  setState({ group: groupKey(run, group), at }, true);
  find("#group").focus({ preventScroll: true });
  if (find("#group").getBoundingClientRect().top > innerHeight * 0.8) find("#group").scrollIntoView({ block: "start" });
}

function nothingOpen() {
  if (rollouts.entries.length > 0) return "No completion passes the filters; clear one of them.";
  return page.data.live === null ? "The page has no rollouts." : "No rollouts are loaded yet.";
}

function drawGroup(focused = null) {
  const place = find("#group");
  if (!place) return;
  for (const row of findAll(".list-row"))
    row.toggleAttribute("aria-current", row.dataset.group === state.group && row.dataset.at === (state.at ?? ""));
  for (const row of findAll(".list-row[aria-current]")) row.setAttribute("aria-current", "true");
  const entry =
    rollouts.entries.find((one) => groupKey(one.run, one.group) === state.group) ??
    (state.group ? null : rollouts.found[0]);
  if (!entry) return fill(place, el("p", { class: "quiet" }, nothingOpen()));
  const { run, group, prompt } = entry;
  fill(
    place,
    groupHead(run, group, prompt),
    el(
      "div",
      { class: "group-body" },
      el(
        "div",
        { class: "prompt-side", tabindex: "0", role: "region", "aria-label": "Prompt" },
        promptView(prompt),
        throughSteps(run, group.prompt, group),
      ),
      el("div", { class: "completions-side" }, readingBar(group, drawGroup), completionGrid(entry)),
    ),
    otherRuns(run, group.prompt, group.step) ?? "",
  );
  if (focused) find(`[data-control="${focused}"]`, place)?.focus();
  if (state.at && state.at !== "0") find(`[data-completion="${CSS.escape(state.at)}"]`, place)?.classList.add("chosen");
}

// Completions that came after the panel was built. An open group stays as it is.
function showNewRollouts() {
  refreshFilters();
  const shownPage = rollouts.shownPage;
  applyFilters();
  rollouts.shownPage = shownPage;
  drawList();
  if (!state.group || !find("#group .completion")) drawGroup();
}

function groupHead(run, group, prompt) {
  const groups = [...new Map(rollouts.found.map((one) => [one.group, one])).values()];
  const at = groups.findIndex((one) => one.group === group);
  const go = (by) => () => openGroup(groups[at + by].run, groups[at + by].group);
  return el(
    "div",
    { class: "group-head" },
    el(
      "h3",
      {},
      several() ? [swatch(run.color, run.dash), foreign(runLabel(run)), " · "] : null,
      `Step ${group.step} · `,
      foreign(prompt.task || "task"),
      ` · group ${group.group}`,
    ),
    el(
      "span",
      { class: "row" },
      button("Previous group", go(-1), { class: "small", disabled: at <= 0 }),
      button("Next group", go(1), { class: "small", disabled: at < 0 || at + 1 >= groups.length }),
    ),
    el(
      "p",
      { class: "quiet" },
      `${plural(group.completions.length, "completion")}, mean reward ${short(groupReward(group))}`,
    ),
  );
}

const LONG_TEXT = 240;
const MOST_PRINTED = 8; // completions of the open group

// Short completions stand in columns, long ones below each other, in lines that are comfortable to read.
function completionGrid({ group }) {
  const { completions } = group;
  const order = bestAndWorstFirst(completions);
  const spread = order.length > 2 && completions[order[0]].reward !== completions[order[1]].reward;
  const mark = (place) => (spread ? (["best", "worst"][place] ?? "") : "");
  const mean = meanOf(completions.map((one) => one.text.length));
  const cards = order.map((at, place) => completionCard(completions[at], at, mark(place)));
  cards.slice(MOST_PRINTED).forEach((card) => card.classList.add("not-printed"));
  const note = `Printed: ${MOST_PRINTED} of ${completions.length} completions.`;
  return [
    el("div", { class: mean > LONG_TEXT ? "completions long" : "completions" }, cards),
    cards.length > MOST_PRINTED ? el("p", { class: "printed-note" }, note) : null,
  ];
}
