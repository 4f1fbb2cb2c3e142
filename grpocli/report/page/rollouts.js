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
  reading.measure = state.color ?? null;
  reading.marks = state.marks === "1";
  const status = el("p", { id: "found", role: "status" });
  fill(
    panel,
    el("h2", { class: "visually-hidden" }, "Rollouts"),
    ...ruleNotes(),
    filterForm(),
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

function ruleNotes() {
  const rules = [...new Set(page.runs.map((run) => run.rollouts.rule).filter(Boolean))];
  return rules.map((rule) => el("p", { class: "quiet rule" }, foreign(rule)));
}

const distinct = (of) =>
  [...new Set(rollouts.entries.map(of))]
    .filter((value) => value !== null && value !== undefined && value !== "")
    .sort();
const withAny = (values, names = {}) => [["", "Any"], ...values.map((value) => [value, names[value] ?? value])];

function filterForm() {
  const rewards = [...new Set(rollouts.entries.flatMap((entry) => Object.keys(entry.completion.rewards)))].sort();
  const select = (key, label, values) =>
    labelled(
      label,
      choices(values, state[key] ?? "", { "data-filter": key, onchange: (event) => filter(key, event.target.value) }),
    );
  const number = (key, label, step = 1) =>
    labelled(
      label,
      el("input", {
        type: "number",
        step,
        value: state[key] ?? "",
        "data-filter": key,
        oninput: (event) => filter(key, event.target.value),
      }),
    );
  const text = labelled(
    "Prompt or completion contains",
    el("input", {
      type: "search",
      value: state.q ?? "",
      "data-filter": "q",
      oninput: (event) => filter("q", event.target.value),
    }),
    { class: "field wide" },
  );
  return el(
    "form",
    { class: "bar filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() },
    range("Steps", number("from", "from"), number("to", "to")),
    several()
      ? select(
          "run",
          "Run",
          withAny(
            page.runs.map((run) => run.id),
            Object.fromEntries(page.runs.map((run) => [run.id, runLabel(run)])),
          ),
        )
      : null,
    distinct((entry) => entry.prompt.task).length > 1
      ? select("task", "Task", withAny(distinct((entry) => entry.prompt.task)))
      : null,
    text,
    select("adv", "Advantage", withAny(["positive", "negative", "zero"])),
    select("finish", "Finish reason", withAny(distinct((entry) => entry.completion.finish))),
    select("status", "Status", withAny(distinct((entry) => entry.completion.status))),
    rewards.map((name) => range(name, number(`min.${name}`, "from", "any"), number(`max.${name}`, "to", "any"))),
    labelled(
      "Order",
      choices(
        Object.entries(SORTS).map(([key, [label]]) => [key, label]),
        state.sort ?? "newest",
        { "data-filter": "sort", onchange: (event) => filter("sort", event.target.value) },
      ),
    ),
    button("Clear filters", clearFilters),
  );
}

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

// A function that says whether an entry passes all filters.
function filterTest() {
  const bound = (key) =>
    state[key] !== undefined && state[key].trim() !== "" && Number.isFinite(Number(state[key]))
      ? Number(state[key])
      : null;
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
          el("span", { class: "excerpt" }, foreign(excerpt(completion.text, 140) || "(empty)")),
        ),
        el(
          "span",
          { class: "row-numbers" },
          `step ${group.step}`,
          several() ? [" · ", foreign(runLabel(run))] : null,
          ` · reward ${short(completion.reward)}`,
          isNumber(completion.advantage) ? ` · advantage ${signed(completion.advantage)}` : "",
          " · ",
          foreign(completion.finish),
          ` · ${plural(completion.length, "token")}`,
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

function drawGroup(focused = null) {
  const place = find("#group");
  if (!place) return;
  for (const row of findAll(".list-row"))
    row.toggleAttribute("aria-current", row.dataset.group === state.group && row.dataset.at === (state.at ?? ""));
  for (const row of findAll(".list-row[aria-current]")) row.setAttribute("aria-current", "true");
  const entry =
    rollouts.entries.find((one) => groupKey(one.run, one.group) === state.group) ??
    (state.group ? null : rollouts.found[0]);
  if (!entry)
    return fill(
      place,
      el(
        "p",
        { class: "quiet" },
        rollouts.entries.length === 0 ? "No rollouts." : "Choose a completion from the list.",
      ),
    );
  const { run, group, prompt } = entry;
  fill(
    place,
    groupHead(run, group, prompt),
    promptView(prompt),
    throughSteps(run, group.prompt, group) ?? "",
    readingBar(group, drawGroup),
    completionGrid(entry),
    otherRuns(run, group.prompt, group.step) ?? "",
  );
  if (focused) find(`[data-control="${focused}"]`, place)?.focus();
  if (state.at && state.at !== "0") find(`[data-completion="${CSS.escape(state.at)}"]`, place)?.classList.add("chosen");
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

function completionGrid({ run, group }) {
  const order = bestAndWorstFirst(group.completions);
  const spread = order.length > 2 && group.completions[order[0]].reward !== group.completions[order[1]].reward;
  return el(
    "div",
    { class: "completions" },
    order.map((at, place) =>
      completionCard(
        run,
        group.completions[at],
        at,
        spread && place === 0 ? "best" : spread && place === 1 ? "worst" : "",
      ),
    ),
  );
}
