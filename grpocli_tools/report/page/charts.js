// One chart: uPlot for the lines, the values under the step cursor as text, a table, CSV.

const CHART_HEIGHT = 170;

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
const lineColor = (number) => cssColor(`--c${number % COLORS}`);

function faint(color, alpha) {
  const [r, g, b] = [1, 3, 5].map((start) => parseInt(color.slice(start, start + 2), 16));
  return `rgba(${r},${g},${b},${alpha})`;
}

class CurveChart {
  constructor(chart, view) {
    this.chart = chart;
    this.view = view; // the options of all curves: smoothing, log axis, band
    this.lines = chart.lines.filter((line) => page.runs.some((run) => hasMetric(run, line.metric)));
    this.line = this.lines[0]; // of several runs one line is shown at a time
    this.plot = null;
    this.element = this.build();
  }

  build() {
    const { id, title, unit } = this.chart;
    this.area = el("div", {
      class: "plot",
      tabindex: "0",
      role: "slider",
      "aria-label": `${clean(title)}: step cursor`,
      "aria-orientation": "horizontal",
      "aria-valuemin": "0",
      "aria-valuemax": "0",
      "aria-valuenow": "0",
      onkeydown: (event) => chartKey(event, this),
      onmouseenter: () => this.showValues(),
      onmouseleave: () => this.showValues(),
      onfocus: () => this.showValues(),
      onblur: () => this.showValues(),
    });
    this.values = el("dl", { class: "values" });
    this.body = el("tbody");
    this.table = el("details", { class: "table", ontoggle: () => this.fillTable() }, el("summary", {}, "Table"));
    const pick = several() && this.lines.length > 1 ? this.picker() : null;
    return el(
      "section",
      { class: "chart", id: `chart-${id}`, "aria-labelledby": `title-${id}` },
      el(
        "div",
        { class: "chart-head" },
        el("h3", { id: `title-${id}` }, foreign(title), unit ? el("span", { class: "unit" }, foreign(unit)) : null),
        pick,
      ),
      this.area,
      this.values,
      el(
        "div",
        { class: "chart-foot" },
        this.table,
        button("Save CSV", () => this.save(), { class: "small", "aria-label": `Save CSV of ${clean(title)}` }),
      ),
      this.chart.help ? el("p", { class: "help" }, foreign(this.chart.help)) : null,
    );
  }

  picker() {
    const select = choices(
      this.lines.map((line) => [line.metric, line.label]),
      this.line.metric,
      {
        "aria-label": `Line of ${clean(this.chart.title)}`,
        onchange: () => {
          this.line = this.lines.find((line) => line.metric === select.value);
          this.redraw();
        },
      },
    );
    return select;
  }

  // The series of uPlot, with the bands between two of them.
  plan() {
    const runs = visibleRuns();
    const steps = unionOfSteps(runs);
    const plan = { steps, series: [], bands: [] };
    if (several()) this.planGroups(plan);
    else if (this.chart.stacked) this.planStack(plan, runs[0]);
    else this.planLines(plan, runs[0]);
    return plan;
  }

  planLines(plan, run) {
    if (!run) return;
    this.lines.forEach((line, number) => {
      const color = lineColor(number);
      const values = seriesOf(run, line.metric, plan.steps);
      if (line.low && hasMetric(run, line.low)) {
        addBand(plan, seriesOf(run, line.low, plan.steps), seriesOf(run, line.high, plan.steps), color);
      }
      addSmoothed(plan, values, color, [], this.view.smoothing);
    });
  }

  planStack(plan, run) {
    if (!run) return;
    let below = plan.steps.map(() => 0);
    plan.series.push({ values: below, color: "transparent", width: 0 });
    this.lines.forEach((line, number) => {
      const values = smooth(seriesOf(run, line.metric, plan.steps), this.view.smoothing);
      const top = values.map((value, at) => below[at] + (value ?? 0));
      plan.series.push({ values: top, color: lineColor(number), width: 1 });
      plan.bands.push({ series: [plan.series.length, plan.series.length - 1], fill: faint(lineColor(number), 0.45) });
      below = top;
    });
  }

  planGroups(plan) {
    for (const group of page.groups) {
      const runs = group.runs.filter((run) => !page.hidden.has(run.id) && hasMetric(run, this.line.metric));
      if (runs.length === 0) continue;
      const color = lineColor(group.color);
      const raw = runs.map((run) => seriesOf(run, this.line.metric, plan.steps));
      const lines = raw.map((values) => smooth(values, this.view.smoothing));
      if (runs.length === 1) {
        addSmoothed(plan, raw[0], color, group.dash, this.view.smoothing);
        continue;
      }
      const { mean, low, high } = meanAndBand(lines, this.view.band);
      addBand(plan, low, high, color);
      if (this.view.single)
        for (const values of lines)
          plan.series.push({ values, color: faint(color, 0.45), width: 0.75, dash: group.dash });
      plan.series.push({ values: mean, color, width: 1.75, dash: group.dash });
    }
  }

  draw() {
    if (this.plot) return;
    const plan = this.plan();
    this.steps = plan.steps;
    if (plan.steps.length === 0 || plan.series.length === 0) {
      fill(this.area, el("p", { class: "quiet empty" }, "no numbers yet"));
      return;
    }
    fill(this.area);
    this.plot = new uPlot(chartOptions(this, plan), chartData(this, plan), this.area);
    this.shape = shapeOf(plan);
    this.showStep();
  }

  redraw() {
    const drawn = this.plot !== null || find(".empty", this.area) !== null;
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (drawn) this.draw();
    this.showValues();
  }

  // New steps of a live run: the lines grow, the zoom stays.
  extend() {
    if (!this.plot) return this.redraw();
    const plan = this.plan();
    if (shapeOf(plan) !== this.shape) return this.redraw();
    this.steps = plan.steps;
    this.plot.setData(chartData(this, plan), true);
    this.zoomTo(page.zoom);
    this.showStep();
    this.showValues();
  }

  zoomTo(zoom) {
    if (!this.plot || this.steps.length === 0) return;
    const [min, max] = zoom ?? [this.steps[0], this.steps[this.steps.length - 1]];
    this.plot.setScale("x", min === max ? { min: min - 1, max: max + 1 } : { min, max });
  }

  // Moves the cursor of this chart to the step of the page.
  showStep() {
    if (!this.plot || page.step === null) return;
    const { min, max } = this.plot.scales.x;
    const outside = page.step < min || page.step > max;
    this.plot.setCursor({ left: outside ? -10 : this.plot.valToPos(page.step, "x"), top: outside ? -10 : 5 }, false);
  }

  showValues() {
    const rows = several() ? this.groupRows() : this.lineRows();
    fill(this.values, ...rows.flat());
    const steps = page.steps;
    setAttributes(this.area, {
      "aria-valuemin": steps[0] ?? 0,
      "aria-valuemax": steps[steps.length - 1] ?? 0,
      "aria-valuenow": page.step ?? 0,
      "aria-valuetext":
        `step ${page.step}: ` +
        findAll("dd", this.values)
          .slice(0, 8)
          .map((item) => `${item.dataset.label} ${item.textContent}`)
          .join(", "),
    });
  }

  // Every digit while the reader points at the chart or its cursor has the focus.
  get exact() {
    return this.area.matches(":hover, :focus");
  }

  lineRows() {
    const run = page.runs[0];
    return this.lines.map((line, number) => valueRow(line.metric, line.label, run, number, [], this.exact));
  }

  groupRows() {
    const rows = [];
    for (const group of page.groups) {
      const runs = group.runs.filter((run) => !page.hidden.has(run.id));
      if (runs.length === 0) continue;
      if (runs.length === 1) rows.push(valueRow(this.line.metric, runLabel(runs[0]), runs[0], group.color, group.dash, this.exact));
      else {
        rows.push(meanRow(this.line.metric, group, runs, this.view.band));
        if (this.view.single)
          for (const run of runs) rows.push(valueRow(this.line.metric, seedLabel(run), run, null, [], this.exact));
      }
    }
    return rows;
  }

  columns() {
    const lines = this.lines.flatMap((line) => [line.metric, line.low, line.high]).filter(Boolean);
    return [...new Set(lines)];
  }

  fillTable() {
    if (!this.table.open || this.table.childElementCount > 1) return;
    const runs = visibleRuns();
    const columns = several() ? [this.line.metric] : this.lines.map((line) => line.metric);
    const steps = unionOfSteps(runs);
    const kept = evenlySpaced(steps.length, 50).map((number) => steps[number]);
    const rows = kept.map((step) =>
      el(
        "tr",
        {},
        el("th", { scope: "row" }, String(step)),
        runs.flatMap((run) =>
          columns.map((metric) => el("td", { class: "number" }, short(valueAt(run, metric, step)))),
        ),
      ),
    );
    const heads = runs.flatMap((run) =>
      columns.map((metric) =>
        el(
          "th",
          { scope: "col" },
          foreign(several() ? runLabel(run) : this.lines.find((line) => line.metric === metric).label),
        ),
      ),
    );
    const note = kept.length < steps.length ? `${kept.length} of ${count(steps.length)} steps; Save CSV has them all.` : "";
    this.table.append(
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": `Table of ${clean(this.chart.title)}` },
        el(
          "table",
          {},
          el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "step"), heads)),
          el("tbody", {}, rows),
        ),
      ),
      note ? el("p", { class: "quiet" }, note) : "",
    );
  }

  save() {
    save(`${this.chart.id}.csv`, csv(curveRows(visibleRuns(), this.columns())));
  }
}

function curveRows(runs, metrics) {
  const rows = [["run", "step", ...metrics]];
  for (const run of runs) {
    const kept = metrics.map((metric) => run.metrics[metric] ?? []);
    run.steps.forEach((step, number) => {
      const values = kept.map((series) => series[number] ?? null);
      if (values.some((value) => value !== null)) rows.push([run.name, step, ...values]);
    });
  }
  return rows;
}

function addBand(plan, low, high, color) {
  plan.series.push({ values: high, color: "transparent", width: 0 }, { values: low, color: "transparent", width: 0 });
  plan.bands.push({ series: [plan.series.length - 1, plan.series.length], fill: faint(color, 0.16) });
}

function addSmoothed(plan, values, color, dash, weight) {
  const smoothed = smooth(values, weight);
  if (smoothed !== values) plan.series.push({ values, color: faint(color, 0.3), width: 1 });
  plan.series.push({ values: smoothed, color, width: 1.5, dash });
}

const shapeOf = (plan) => plan.series.map((one) => `${one.color}${one.width}`).join() + plan.bands.length;

function swatch(number, dash) {
  if (number === null) return el("span", { class: "swatch none" });
  return svg(
    "svg",
    { class: "swatch", viewBox: "0 0 16 8", width: 16, height: 8, "aria-hidden": "true" },
    svg("line", {
      x1: 0,
      y1: 4,
      x2: 16,
      y2: 4,
      "stroke-dasharray": dash.map((one) => one / 1.5).join(" ") || null,
      class: `stroke-${number % COLORS}`,
    }),
  );
}

function valueRow(metric, label, run, color, dash, exact) {
  const value = run ? valueAt(run, metric, page.step) : null;
  return [
    el("dt", { title: clean(label) }, swatch(color, dash), foreign(label)),
    el(
      "dd",
      {
        "data-metric": metric,
        "data-run": run?.id ?? "",
        "data-label": clean(label),
        "data-value": value,
        title: full(value),
      },
      exact ? full(value) : short(value, 5),
    ),
  ];
}

function meanRow(metric, group, runs, kind) {
  const values = runs.map((run) => [valueAt(run, metric, page.step)]);
  const { mean, low, high } = meanAndBand(values, kind);
  const band = mean[0] === null || low[0] === high[0] ? "" : ` [${short(low[0])}, ${short(high[0])}]`;
  const known = values.filter(([value]) => value !== null).length;
  const seeds = known < values.length ? ` ${known} of ${values.length} seeds` : ` ${values.length} seeds`;
  return [
    el(
      "dt",
      {},
      swatch(group.color, group.dash),
      foreign(group.label),
      el("span", { class: "quiet" }, seeds),
    ),
    el(
      "dd",
      { "data-metric": metric, "data-group": group.name, "data-label": clean(group.label), "data-value": mean[0] },
      short(mean[0]),
      el("span", { class: "quiet" }, band),
    ),
  ];
}

function chartData(chart, plan) {
  const positive = chart.logs ? (value) => (value > 0 ? value : null) : (value) => value;
  return [plan.steps, ...plan.series.map((one) => one.values.map(positive))];
}

// Axis labels as short as the distance between two of them allows.
function axisLabels(values) {
  const distance = values.length > 1 ? Math.abs(values[1] - values[0]) : 0;
  const largest = Math.max(...values.map(Math.abs));
  if (largest > 0 && (largest < 1e-3 || largest >= 1e6))
    return values.map((value) =>
      value === 0 ? "0" : value.toExponential(distance < largest / 20 ? 1 : 0).replace("e+", "e"),
    );
  let decimals = 0;
  while (decimals < 9 && Math.abs(distance * 10 ** decimals - Math.round(distance * 10 ** decimals)) > 1e-6) decimals++;
  return values.map((value) =>
    value === null ? "" : largest >= 10000 ? `${Number((value / 1000).toPrecision(4))}k` : value.toFixed(decimals),
  );
}

function logLabels(values) {
  return values.map((value) =>
    value === null
      ? ""
      : value >= 0.01 && value < 10000
        ? String(Number(value.toPrecision(2)))
        : value.toExponential(0).replace("e+", "e"),
  );
}

function chartOptions(chart, plan) {
  const isPositive = (one) => one.values.some((value) => value > 0);
  chart.logs = chart.view.log && !chart.chart.stacked && plan.series.some(isPositive);
  return {
    width: chart.area.clientWidth || 320,
    height: CHART_HEIGHT,
    padding: [10, 8, 0, 0],
    legend: { show: false },
    cursor: chartCursor(chart),
    scales: {
      x: { time: false, range: (u, min, max) => (min === max ? [min - 1, max + 1] : [min, max]) },
      y: yScale(chart),
    },
    axes: chartAxes(chart),
    series: [{}, ...lineOptions(plan)],
    bands: plan.bands,
    hooks: { drawAxes: [drawStarts], setSelect: [(u) => zoomBySelection(u)], setCursor: [(u) => cursorMoved(u, chart)] },
  };
}

// A dashed line where a session of the run begins, between its first step and the one before.
function drawStarts(u) {
  if (several()) return;
  const { left, top, width, height } = u.bbox;
  u.ctx.save();
  u.ctx.beginPath();
  u.ctx.rect(left, top, width, height);
  u.ctx.clip();
  u.ctx.beginPath();
  u.ctx.strokeStyle = cssColor("--control");
  u.ctx.lineWidth = devicePixelRatio;
  u.ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const step of page.runs[0]?.starts ?? []) {
    const x = Math.round(u.valToPos(step + 0.5, "x", true));
    u.ctx.moveTo(x, top);
    u.ctx.lineTo(x, top + height);
  }
  u.ctx.stroke();
  u.ctx.restore();
}

// Lines of few points show the points.
function lineOptions(plan) {
  const counts = plan.series.map((one) => one.values.filter((value) => value !== null).length);
  const few = Math.max(0, ...counts) <= 12;
  return plan.series.map((one) => ({
    stroke: one.color,
    width: one.width,
    dash: one.dash?.length ? one.dash : undefined,
    spanGaps: true,
    points: { show: one.width > 0 && few, size: 5, fill: one.color },
  }));
}

const stepLabel = (step) => (step >= 10000 ? `${step / 1000}k` : String(step));

function chartAxes(chart) {
  const look = {
    stroke: cssColor("--quiet"),
    font: `11px ${cssColor("--font")}`,
    grid: { stroke: cssColor("--grid"), width: 1 },
    ticks: { show: false },
  };
  const labels = (u, values) => (chart.logs ? logLabels(values) : axisLabels(values));
  return [
    { ...look, size: 24, gap: 2, space: 60, incrs: STEP_INCREMENTS, values: (u, values) => values.map(stepLabel) },
    { ...look, size: axisWidth, gap: 4, space: 28, values: labels },
  ];
}

const STEP_INCREMENTS = [1, 2, 5]
  .flatMap((base) => [0, 1, 2, 3, 4, 5].map((power) => base * 10 ** power))
  .sort((a, b) => a - b);

function yScale(chart) {
  if (chart.logs) return { distr: 3 };
  const flat = (min, max) => [min - (Math.abs(min) * 0.1 || 0.5), max + (Math.abs(max) * 0.1 || 0.5)];
  return {
    range: (u, min, max) => {
      if (min === null) return [0, 1];
      if (chart.chart.stacked) return [0, max * 1.05 || 1];
      if (max - min <= 1e-5 * Math.abs(max)) return max === 0 ? [0, 1] : flat(min, max);
      return uPlot.rangeNum(min, max, 0.08, min >= 0 && min < max * 0.25);
    },
  };
}

function axisWidth(u, values) {
  const longest = (values ?? []).reduce((most, value) => Math.max(most, (value ?? "").length), 0);
  return Math.max(30, Math.ceil(longest * 6.4) + 8);
}

function chartCursor(chart) {
  return {
    y: false,
    drag: { x: true, y: false, setScale: false, dist: 6 },
    points: { size: 6, show: (u, number) => u.series[number].width > 0 },
    focus: { prox: -1 },
    move: (u, left, top) => {
      if (left < 0 || chart.steps.length === 0) return [left, top];
      return [u.valToPos(nearest(chart.steps, u.posToVal(left, "x")), "x"), top];
    },
    bind: {
      dblclick: () => () => {
        setZoom(null);
        return null;
      },
      click: (u) => (event) => {
        chartClicked(u, chart);
        return null;
      },
    },
  };
}
