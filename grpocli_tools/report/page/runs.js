// Several runs: results, differences, each run's facts, and a wall with one small curve for each run.

function buildResults(panel) {
  const { results, differences } = page.data;
  const isMean = (row) => results.header[1] === "runs" && row[1] > 1;
  fill(
    panel,
    el("h2", {}, "Results"),
    results
      ? [sortableTable(results, "Results", isMean), notes(results.notes)]
      : el("p", { class: "quiet" }, "No results yet."),
    el("h2", {}, "What differs between the configs"),
    differences && differences.rows.length
      ? [sortableTable(differences, "Differences"), notes(differences.notes)]
      : el("p", { class: "quiet" }, "Nothing: the runs have the same settings."),
    el("h2", {}, "Runs"),
    page.runs.map(runDetails),
  );
}

const notes = (texts) => texts.map((text) => el("p", { class: "quiet" }, foreign(text)));

function runDetails(run) {
  const details = el(
    "details",
    { class: "run" },
    el(
      "summary",
      {},
      swatch(run.color, run.dash),
      el("strong", {}, foreign(runLabel(run))),
      " ",
      stateWord(run.state),
      " ",
      verdictWord(run.verdict),
      " ",
      el("span", {}, foreign(run.verdict.text)),
    ),
  );
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(el("div", { class: "run-body" }, runBody(run)));
  });
  return details;
}

function buildWall(panel) {
  const metrics = [...new Set(page.data.charts.flatMap((chart) => chart.lines.map((line) => line.metric)))].filter(
    (metric) => page.runs.some((run) => hasMetric(run, metric)),
  );
  if (!metrics.includes(state.wall)) state.wall = metrics.includes("reward") ? "reward" : metrics[0];
  const names = new Map(
    page.data.charts.flatMap((chart) =>
      chart.lines.map((line) => [
        line.metric,
        line.metric === line.label ? line.metric : `${chart.title}: ${line.label}`,
      ]),
    ),
  );
  const select = choices(
    metrics.map((metric) => [metric, names.get(metric)]),
    state.wall,
    { onchange: () => setState({ wall: select.value }) },
  );
  const grid = el("div", { class: "wall" });
  fill(panel, el("h2", {}, "One curve for each run"), el("div", { class: "bar" }, labelled("Metric", select)), grid);
  drawWall();
}

function drawWall() {
  const grid = find(".wall");
  if (!grid || page.runs.length === 0) return;
  const metric = state.wall;
  const weight = page.steps.length >= 40 ? 0.6 : 0;
  const values = page.runs.map((run) => smooth(seriesOf(run, metric, run.steps), weight));
  const all = values.flat().filter((value) => value !== null);
  const low = all.reduce((a, b) => Math.min(a, b), Infinity);
  const high = all.reduce((a, b) => Math.max(a, b), -Infinity);
  const [first, last] = [page.steps[0], page.steps[page.steps.length - 1]];
  const axes = `All with the same axes: steps ${first} to ${last}, ${short(low)} to ${short(high)}.`;
  fill(
    grid,
    page.runs.map((run, number) => wallTile(run, metric, values[number], { low, high, first, last })),
    el("p", { class: "quiet wall-scale" }, all.length ? axes : "No numbers yet."),
  );
}

function wallTile(run, metric, values, axes) {
  const numbers = values.filter((value) => value !== null);
  const step = run.steps[run.steps.length - 1] ?? 0;
  const end = numbers.length ? short(numbers[numbers.length - 1]) : "no numbers";
  const state = run.state === "done" ? null : [" ", stateWord(run.state)];
  return el(
    "figure",
    { class: "tile" },
    el("figcaption", {}, swatch(run.color, run.dash), foreign(runLabel(run)), state),
    curve(run.steps, values, { ...axes, color: run.color, label: `${metric} of ${runLabel(run)}` }),
    el("p", { class: "quiet" }, `step ${step}: `, el("strong", {}, end)),
  );
}

// A small curve without axes.
function curve(steps, values, { low, high, first, last, color, label, width = 240, height = 64 }) {
  const x = (step) => (last === first ? width / 2 : ((step - first) / (last - first)) * (width - 4) + 2);
  const y = (value) => (high === low ? height / 2 : height - 3 - ((value - low) / (high - low)) * (height - 6));
  const points = steps
    .map((step, number) => [step, values[number]])
    .filter(([, value]) => isNumber(value))
    .map(([step, value]) => [x(step), y(value)]);
  const path = points.map(([a, b], number) => `${number ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`).join("");
  return svg(
    "svg",
    {
      class: "curve",
      viewBox: `0 0 ${width} ${height}`,
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": clean(label),
    },
    svg("path", { d: path, class: `stroke-${color % COLORS}` }),
    points.length <= 12
      ? points.map(([a, b]) => svg("circle", { cx: a, cy: b, r: 2.5, class: `fill-${color % COLORS}` }))
      : [],
  );
}
