// The curves: a grid of charts under headings, with one step cursor, one zoom and one smoothing for all of them.

const curves = {
  folded: "", // the ids of the charts that never change
  charts: [],
  view: { smoothing: 0, log: false, band: "range", single: false },
  observer: null,
  panel: null,
  moving: false,
};

function buildCurves(panel) {
  curves.panel = panel;
  curves.observer?.disconnect();
  curves.view.smoothing = Number(state.smooth ?? (page.steps.length >= 40 ? 0.6 : 0));
  curves.view.log = state.log === "1";
  curves.view.band = state.band === "sd" ? "sd" : "range";
  curves.view.single = state.single === "1";
  curves.charts = page.data.charts
    .map((chart) => new CurveChart(chart, curves.view))
    .filter((chart) => chart.lines.length > 0);
  fill(
    panel,
    el("h2", { class: "visually-hidden" }, "Curves"),
    curvesBar(),
    several() ? runSwitches() : "",
    thinningNote(),
    startsNote(),
    ...chartSections(),
    constantCharts(),
    curves.charts.length === 0 ? el("p", { class: "quiet" }, "No metrics yet: the first step has not ended.") : "",
  );
  drawWhenVisible();
  moveTo(page.step);
}

function chartSections() {
  const sections = new Map();
  for (const chart of curves.charts.filter((one) => !isConstant(one))) {
    const { section } = chart.chart;
    sections.set(section, [...(sections.get(section) ?? []), chart.element]);
  }
  return [...sections].map(([name, charts]) =>
    el("section", { class: "charts" }, el("h2", {}, foreign(name)), el("div", { class: "grid" }, charts)),
  );
}

const FEWEST_FOR_CONSTANT = 5;

// The number that a metric always has, in all runs; null if it changes.
function constantOf(metric) {
  const numbers = page.runs.flatMap((run) => (run.metrics[metric] ?? []).filter(isNumber));
  return numbers.length > 0 && numbers.every((value) => value === numbers[0]) ? numbers[0] : null;
}

// Whether a chart shows no more than its numbers in a line of text would: none changes, and no warning is about it.
function isConstant({ chart, lines }) {
  const isWarned = page.runs.some((run) => run.warnings.some((warning) => warning.chart === chart.id));
  if (chart.id === "reward" || isWarned || page.steps.length < FEWEST_FOR_CONSTANT) return false;
  return lines.every((line) => !line.low && constantOf(line.metric) !== null);
}

// Charts that never change, folded into a line with their numbers.
function constantCharts() {
  const charts = curves.charts.filter(isConstant);
  curves.folded = foldedCharts();
  if (charts.length === 0) return "";
  const summary = charts.map(constantText).join(" · ");
  return el(
    "details",
    { class: "constant" },
    el("summary", {}, el("strong", {}, "Constant: "), foreign(summary)),
    el(
      "div",
      { class: "grid" },
      charts.map((chart) => chart.element),
    ),
  );
}

function constantText({ chart, lines }) {
  const values = lines.map((line) => constantOf(line.metric));
  if (values.every((value) => value === values[0])) return `${chart.title} ${short(values[0])}`;
  return `${chart.title}: ` + lines.map((line, at) => `${line.label} ${short(values[at])}`).join(", ");
}

const foldedCharts = () =>
  curves.charts
    .filter(isConstant)
    .map((one) => one.chart.id)
    .join();

// Where sessions begin, which the charts of a run mark.
function startsNote() {
  const last = page.steps[page.steps.length - 1] ?? 0;
  const starts = several() ? [] : (page.runs[0]?.starts ?? []).filter((step) => step < last);
  if (starts.length === 0) return "";
  const shown = starts.map(count).join(", ");
  return el("p", { class: "quiet starts" }, `Dashed line: the run was resumed after step ${shown}.`);
}

function thinningNote() {
  const notes = [...new Set(page.runs.map((run) => run.thinning).filter(Boolean))];
  return notes.length === 0 ? "" : el("p", { class: "quiet" }, foreign(notes.join(" ")));
}

function curvesBar() {
  return el(
    "div",
    { class: "bar", role: "group", "aria-label": "How curves are drawn" },
    stepField(),
    smoothingField(),
    el(
      "label",
      { class: "check" },
      checkbox(curves.view.log, (on) => changeView({ log: on }, { log: on ? 1 : "" }), "log"),
      "Log axis",
    ),
    several() ? seedFields() : null,
    button("Reset zoom", () => setZoom(null), {
      id: "reset-zoom",
      disabled: page.zoom === null,
      title: "Also: double click, or Escape in a chart",
    }),
    button("Save all as CSV", saveAll, { id: "save-all" }),
    el(
      "p",
      { class: "help" },
      "Drag to zoom. In a chart: arrow keys move the step cursor (Shift: 10 steps), + and - zoom, ",
      "Enter or a click opens the step's rollouts.",
    ),
  );
}

function checkbox(on, changed, id) {
  const box = el("input", { type: "checkbox", checked: on, "data-control": id, onchange: () => changed(box.checked) });
  return box;
}

function stepField() {
  const input = el("input", {
    type: "number",
    id: "cursor-step",
    value: page.step ?? "",
    min: page.steps[0] ?? 0,
    max: page.steps[page.steps.length - 1] ?? 0,
  });
  input.addEventListener("change", () => userMoves(nearest(page.steps, Number(input.value))));
  return labelled(
    "Step",
    el(
      "span",
      { class: "row" },
      input,
      button("Rollouts", () => openStep(), { class: "small", "aria-label": "Rollouts of this step" }),
    ),
  );
}

function smoothingField() {
  const output = el("output", {}, curves.view.smoothing.toFixed(2));
  const slider = el("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: curves.view.smoothing,
    "data-control": "smoothing",
  });
  slider.addEventListener("input", () => {
    output.textContent = Number(slider.value).toFixed(2);
    changeView({ smoothing: Number(slider.value) }, { smooth: slider.value });
  });
  return labelled("Smoothing (moving average)", el("span", { class: "row" }, slider, output));
}

function seedFields() {
  const band = choices(
    [
      ["range", "Minimum to maximum"],
      ["sd", "± 1 standard deviation"],
    ],
    curves.view.band,
    { "data-control": "band" },
  );
  band.addEventListener("change", () => changeView({ band: band.value }, { band: band.value }));
  return [
    labelled("Band of the seeds", band),
    el(
      "label",
      { class: "check" },
      checkbox(curves.view.single, (on) => changeView({ single: on }, { single: on ? 1 : "" }), "single"),
      "Each seed",
    ),
  ];
}

function changeView(view, address) {
  Object.assign(curves.view, view);
  setState(address);
  scheduleRedraw();
}

let redrawScheduled = false;
function scheduleRedraw() {
  if (redrawScheduled) return;
  redrawScheduled = true;
  requestAnimationFrame(() => {
    redrawScheduled = false;
    curves.charts.forEach((chart) => chart.redraw());
    curves.charts.forEach((chart) => chart.zoomTo(page.zoom));
    drawWhenVisible();
    moveTo(page.step);
  });
}

// Charts are drawn when they come near the window, so that a page with many of them opens at once.
function drawWhenVisible() {
  curves.observer?.disconnect();
  const byArea = new Map(curves.charts.map((chart) => [chart.area, chart]));
  curves.observer = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) if (entry.isIntersecting) drawChart(byArea.get(entry.target));
    },
    { rootMargin: "300px" },
  );
  for (const chart of curves.charts) if (!chart.plot) curves.observer.observe(chart.area);
}

function drawChart(chart) {
  curves.observer.unobserve(chart.area);
  if (chart.plot) return;
  chart.draw();
  chart.zoomTo(page.zoom);
  chart.showStep();
  if (!page.firstChart) page.firstChart = performance.now();
}

const drawAll = () => curves.charts.forEach(drawChart);

// The run switches: one box for each group of seeds, and one for each of its runs.
function runSwitches() {
  const switches = page.groups.map((group) => {
    const boxes = group.runs.map((run) => checkbox(!page.hidden.has(run.id), (on) => show([run], on), `run-${run.id}`));
    const all = checkbox(true, (on) => show(group.runs, on), `group-${group.name}`);
    const sync = () => {
      group.runs.forEach((run, number) => (boxes[number].checked = !page.hidden.has(run.id)));
      const shownRuns = group.runs.filter((run) => !page.hidden.has(run.id)).length;
      all.checked = shownRuns > 0;
      all.indeterminate = shownRuns > 0 && shownRuns < group.runs.length;
    };
    function show(runs, on) {
      for (const run of runs) on ? page.hidden.delete(run.id) : page.hidden.add(run.id);
      setState({ hidden: [...page.hidden].join(",") });
      sync();
      scheduleRedraw();
    }
    sync();
    const seeds =
      group.runs.length > 1
        ? group.runs.map((run, number) => el("label", { class: "check seed" }, boxes[number], foreign(seedLabel(run))))
        : [];
    return el(
      "div",
      { class: "run-switch" },
      el("label", { class: "check" }, all, swatch(group.color, group.dash), foreign(group.label)),
      seeds,
    );
  });
  return el("fieldset", { class: "runs" }, el("legend", {}, "Runs"), switches);
}

// Moves the step cursor of all charts.
function moveTo(step) {
  page.step = step;
  curves.moving = true;
  for (const chart of curves.charts) {
    chart.showStep();
    chart.showValues();
  }
  curves.moving = false;
  const input = find("#cursor-step");
  if (input && document.activeElement !== input) input.value = step ?? "";
}

function userMoves(step) {
  if (step === null || step === page.step) return;
  page.follows = step === page.steps[page.steps.length - 1];
  moveTo(step);
  setState({ step });
}

let hoverScheduled = null;
function cursorMoved(u, chart) {
  if (curves.moving || u.cursor.left < 0 || u.cursor.event === null || !chart.steps?.length) return;
  const step = nearest(chart.steps, u.posToVal(u.cursor.left, "x"));
  if (hoverScheduled === null)
    requestAnimationFrame(() => {
      const target = hoverScheduled;
      hoverScheduled = null;
      userMoves(target);
    });
  hoverScheduled = step;
}

function zoomBySelection(u) {
  const { left, width } = u.select;
  if (width < 2) return;
  const [first, last] = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  setZoom([nearest(page.steps, first), nearest(page.steps, last)]);
}

function setZoom(zoom) {
  page.zoom = zoom && zoom[0] < zoom[1] ? zoom : null;
  curves.moving = true;
  curves.charts.forEach((chart) => {
    chart.zoomTo(page.zoom);
    chart.showStep();
  });
  curves.moving = false;
  const reset = find("#reset-zoom");
  if (reset) reset.disabled = page.zoom === null;
  setState({ zoom: page.zoom ? page.zoom.join("-") : "" });
}

// factor < 1 zooms in around the step cursor.
function zoomBy(factor) {
  const [first, last] = page.zoom ?? [page.steps[0], page.steps[page.steps.length - 1]];
  const start = page.step - (page.step - first) * factor;
  const end = page.step + (last - page.step) * factor;
  if (factor < 1 && end - start < 2) return;
  const whole = page.steps[page.steps.length - 1] - page.steps[0];
  const all = factor > 1 && end - start >= 0.9 * whole;
  setZoom(
    all
      ? null
      : [Math.max(page.steps[0], Math.round(start)), Math.min(page.steps[page.steps.length - 1], Math.round(end))],
  );
}

function chartKey(event, chart) {
  if (event.ctrlKey || event.metaKey || event.altKey || page.steps.length === 0) return;
  const at = page.steps.indexOf(nearest(page.steps, page.step ?? page.steps[0]));
  const stride = event.shiftKey ? 10 : 1;
  const last = page.steps.length - 1;
  const targets = {
    ArrowLeft: at - stride,
    ArrowDown: at - stride,
    ArrowRight: at + stride,
    ArrowUp: at + stride,
    Home: 0,
    End: last,
    PageDown: at - 10,
    PageUp: at + 10,
  };
  if (event.key in targets) userMoves(page.steps[Math.min(last, Math.max(0, targets[event.key]))]);
  else if (event.key === "Enter") openStep();
  else if (event.key === "+" || event.key === "=") zoomBy(0.5);
  else if (event.key === "-") zoomBy(2);
  else if (event.key === "Escape" || event.key === "0") setZoom(null);
  else return;
  event.preventDefault();
}

function openStep() {
  setState({ tab: "rollouts", from: page.step, to: page.step, group: "", step: page.step }, true);
  find("#main").focus();
}

function saveAll() {
  const runs = visibleRuns();
  const metrics = [...new Set(runs.flatMap((run) => Object.keys(run.metrics)))].sort();
  save("curves.csv", csv(curveRows(runs, metrics)));
}

// A warning's link: the cursor at its step, its chart in view.
function showChart(id, step) {
  setState({ tab: "curves" }, true);
  userMoves(nearest(page.steps, step));
  const chart = curves.charts.find((one) => one.chart.id === id);
  if (!chart) return;
  chart.element.closest("details")?.setAttribute("open", "");
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  chart.element.scrollIntoView({ block: "center", behavior: calm ? "auto" : "smooth" });
  chart.area.focus({ preventScroll: true });
}
