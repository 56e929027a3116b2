// Draws the values of the page with uPlot: curves and parts of a whole, with one cursor through all of them.
"use strict";
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const whole = new Intl.NumberFormat("en");
  const shown = (value) => {
    if (value === null) return "not finite";
    return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)
      ? value.toExponential(2).replace(/\.?0*e\+?/, "e")
      : plain.format(value);
  };
  const iteration = (x) => {
    const epoch = values.epochs.find(([, end]) => Math.round(x) <= end);
    return `iteration ${whole.format(Math.round(x))}` + (epoch ? `, epoch ${epoch[0]}` : "");
  };
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const font = "12px system-ui, sans-serif";
  let active = null; // the plot under the pointer, or with the focus

  const bare = { gap: 8, ticks: { show: false }, grid: { show: false } };
  const axis = (more) => ({ ...bare, stroke: style("--soft"), font, ...more });
  const labels = { values: (u, ticks) => ticks.map((tick) => (tick === null ? null : shown(tick))) };

  // What all plots have in common; `draw` paints over the plot, in pixels of its canvas.
  const plot = (figure, data, { series, bands, y, up, legend, draw }) => {
    const area = figure.querySelector(".plot");
    const range = (u, low, high) => (low === u.data[0][0] && high === u.data[0].at(-1) ? values.across : [low, high]);
    const u = new uPlot({
      width: area.clientWidth,
      height: area.clientHeight,
      padding: [8, 20, 0, 0],
      scales: { x: { time: false, range }, y },
      axes: [axis({ size: 24, ...labels }), axis({ size: 58, space: 40, ...up })],
      series: [{ class: "helper" }, ...series],
      bands,
      legend,
      cursor: {
        y: false,
        // A cursor stands on a point of the first line; in other plots at the same place.
        move: (u, left, top) => [u === active && left >= 0 ? u.valToPos(u.data[0][u.posToIdx(left)], "x") : left, top],
        points: {
          size: (u, i) => (series[i - 1].class ? 0 : 9),
          width: 2,
          fill: (u, i) => series[i - 1].stroke,
          stroke: style("--card"),
        },
        sync: { key: "iterations", scales: ["x", null] },
      },
      hooks: {
        draw: [(u) => {
          u.ctx.save();
          u.ctx.beginPath();
          u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
          u.ctx.clip();
          draw(u.ctx, (x) => u.valToPos(x, "x", true), u.bbox);
          u.ctx.restore();
        }],
        setCursor: [(u) => {
          u.over.querySelector(".u-cursor-x").dataset.place = iteration(u.posToVal(u.cursor.left, "x"));
        }],
        // A click in the legend hides a curve; its band goes, too.
        setSeries: [(u, i, { show }) => {
          if (show !== undefined && series[i]?.class) u.setSeries(i + 1, { show });
        }],
      },
    }, data, area);
    const enter = () => {
      active = u;
      document.querySelectorAll(".active").forEach((other) => other.classList.remove("active"));
      figure.classList.add("active");
    };
    u.over.addEventListener("mousemove", enter, true);
    area.onkeydown = (event) => {
      const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!way) return;
      event.preventDefault();
      if (active !== u || u.cursor.left < 0) u.place = u.over.clientWidth; // begins at the right end
      enter();
      u.place = Math.min(u.over.clientWidth, Math.max(0, u.place + (way * u.over.clientWidth) / 100));
      u.setCursor({ left: u.place, top: 0 }, true, true);
    };
    area.onblur = () => u.setCursor({ left: -10, top: -10 }, true, true);
    return u;
  };

  const chart = (figure, { lines, stacked, fromZero }, isLog) => {
    const colour = (index) => style(`--c${index % 6}`);
    let below = lines[0].x.map(() => 0);
    const tables = lines.map(({ x, y, low, high }) => {
      if (stacked) below = y = y.map((part, i) => part + below[i]);
      return low && !stacked ? [x, y, low, high] : [x, y];
    });
    const series = [], bands = [];
    lines.forEach((line, index) => {
      const stroke = colour(index), first = series.length + 1;
      series.push({
        label: line.name,
        stroke,
        width: 1.75,
        points: { show: line.x.length < (line.marked ? 60 : 2), size: 7, fill: stroke },
        fill: stacked && !index ? stroke + "52" : undefined,
        // Without a cursor, the latest value.
        value: (u, value, s, i) => shown(i === null ? line.y.at(-1) : stacked ? line.y[i] : value),
      });
      if (stacked && index) bands.push({ series: [first, first - 1], fill: stroke + "52" });
      if (tables[index].length > 2) {
        series.push(...[1, 2].map(() => ({ class: "helper", width: 0, points: { show: false } })));
        bands.push({ series: [first + 2, first + 1], fill: stroke + "30" });
      }
    });
    const draw = (ctx, left, box) => {
      const pixel = devicePixelRatio;
      ctx.fillStyle = style("--bad"); // values that are not finite
      lines.flatMap((line) => line.faulty).forEach((x) => ctx.fillRect(left(x) - pixel, box.top, 2 * pixel, 8 * pixel));
      ctx.strokeStyle = ctx.fillStyle = style("--soft");
      ctx.lineWidth = 2 * pixel;
      ctx.setLineDash([6 * pixel, 4 * pixel]);
      ctx.font = `600 ${12 * pixel}px system-ui, sans-serif`;
      ctx.textBaseline = "top";
      values.resumed.forEach((x) => {
        const isLeft = left(x) > box.left + 0.7 * box.width;
        ctx.beginPath();
        ctx.moveTo(left(x), box.top);
        ctx.lineTo(left(x), box.top + box.height);
        ctx.stroke();
        ctx.textAlign = isLeft ? "right" : "left";
        ctx.fillText("resumed", left(x) + (isLeft ? -8 : 8) * pixel, box.top);
      });
    };
    // None of the values may be finite.
    const ends = ([low, high]) => [fromZero || stacked ? Math.min(0, low ?? 0) : low ?? 0, high ?? 1];
    const linear = { min: { pad: 0.06, soft: 0, mode: fromZero || stacked ? 1 : 3 }, max: { pad: 0.06 } };
    return plot(figure, uPlot.join(tables), {
      series,
      bands,
      y: isLog ? { distr: 3 } : { range: (u, ...found) => uPlot.rangeNum(...ends(found), linear) },
      up: { ...labels, grid: { stroke: style("--rule"), width: 1 } },
      legend: {
        mount: (u, table) => figure.querySelector("figcaption").append(table),
        markers: { width: 0, fill: (u, i) => series[i - 1].stroke },
      },
      draw,
    });
  };

  const redraws = [...document.querySelectorAll(".chart")].map((figure, i) => {
    let u = null;
    const area = figure.querySelector(".plot"), button = figure.querySelector("button");
    const redraw = () => {
      u?.destroy();
      u = chart(figure, values.charts[i], button?.getAttribute("aria-pressed") === "true");
    };
    button?.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      redraw();
    });
    redraw();
    new ResizeObserver(() => u.setSize({ width: area.clientWidth, height: area.clientHeight })).observe(area);
    return redraw;
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => redraws.forEach((redraw) => redraw()));
  document.documentElement.dataset.ready = "yes";
})();
