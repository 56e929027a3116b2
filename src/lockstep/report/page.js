// Reads values out under the pointer, in all plots at the same iteration. Without it the page shows the same curves.
"use strict";
(() => {
  const values = JSON.parse(document.getElementById("values").textContent);
  const plain = new Intl.NumberFormat("en", { maximumSignificantDigits: 4 });
  const shown = (value) => {
    if (value === null) return "not finite";
    return value !== 0 && (Math.abs(value) < 1e-3 || Math.abs(value) >= 1e7)
      ? value.toExponential(2).replace(/\.?0*e\+?/, "e")
      : plain.format(value);
  };

  // The index of the place nearest to x in an ascending list.
  const nearest = (places, x) => {
    let low = 0, high = places.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (places[middle] <= x) low = middle; else high = middle;
    }
    return x - places[low] <= places[high] - x ? low : high;
  };

  // An axis from left to right: where on it a value lies (from 0 to 1), the value at a place, and its name in words.
  const axis = ([low, high], named, isLog) => {
    const [to, from] = isLog ? [Math.log, Math.exp] : [Number, Number];
    return {
      named,
      share: (x) => (to(x) - to(low)) / (to(high) - to(low)),
      at: (share) => from(to(low) + Math.min(1, Math.max(0, share)) * (to(high) - to(low))),
    };
  };
  const percent = (share) => `${100 * share}%`;

  const iterations = axis(values.across, (x) => {
    const iteration = Math.round(x);
    const epoch = values.epochs.find(([, end]) => iteration <= end);
    return `iteration ${plain.format(iteration)}` + (epoch ? `, epoch ${epoch[0]}` : "");
  });

  class Chart {
    constructor(figure, { lines, stacked, linear, log }, across) {
      Object.assign(this, { figure, lines, stacked, linear, log, across });
      this.outputs = [...figure.querySelectorAll("output")];
      this.latest = this.outputs.map((output) => output.textContent);
      this.cursor = figure.querySelector(".cursor");
      this.dots = lines.map((_, index) => {
        const dot = this.cursor.parentElement.appendChild(document.createElement("i"));
        dot.className = "dot";
        dot.hidden = true;
        dot.style.setProperty("--c", `var(--c${index % 6})`);
        return dot;
      });
      const button = figure.querySelector("button");
      button?.addEventListener("click", () => {
        button.setAttribute("aria-pressed", figure.classList.toggle("is-log"));
      });
    }

    height(value) {
      const isLog = this.figure.classList.contains("is-log");
      const [low, high, at] = (isLog ? [...this.log, value].map(Math.log10) : [...this.linear, value]);
      return (at - low) / (high - low);
    }

    show(x) {
      let below = 0;
      this.lines.forEach(({ x: places, y }, index) => {
        const at = nearest(places, x), value = y[at], dot = this.dots[index];
        this.outputs[index].textContent = shown(value);
        below = this.stacked ? below + value : value;
        const height = this.height(below);
        dot.hidden = value === null || height > 1;
        dot.style.left = percent(this.across.share(places[at]));
        dot.style.bottom = percent(height);
      });
    }

    // Cursors stand on a point of the first line.
    snap(x) {
      return this.lines[0].x[nearest(this.lines[0].x, x)];
    }

    rest() {
      this.outputs.forEach((output, index) => { output.textContent = this.latest[index]; });
      this.dots.forEach((dot) => { dot.hidden = true; });
    }
  }

  class HeatMap {
    constructor(figure, { begin, end, values: columns, unit }) {
      Object.assign(this, { figure, begin, end, columns, unit, rank: 0 });
      this.output = figure.querySelector("output");
      this.cursor = figure.querySelector(".cursor");
      this.size = columns[0].length;
    }

    show(x) {
      const index = Math.max(0, this.end.findIndex((end) => x <= end));
      const value = shown(this.columns[index][this.rank]);
      this.output.textContent = `rank ${this.rank}: ${value} ${this.unit}`;
    }

    snap(x) {
      return x;
    }

    rest() {
      this.output.textContent = "";
    }
  }

  // Moves one cursor over plots that share an axis.
  const connect = (plots, across) => {
    let place = 1;
    const show = (share, active) => {
      place = Math.min(1, Math.max(0, share)); // not snapped, or keys could not leave a point
      const x = across.at(across.share(active.snap(across.at(share))));
      for (const plot of plots) {
        plot.figure.classList.toggle("active", plot === active);
        plot.cursor.hidden = false;
        plot.cursor.style.left = percent(across.share(x));
        plot.cursor.dataset.place = across.named(x);
        plot.show(x);
      }
    };
    const rest = () => {
      for (const plot of plots) {
        plot.cursor.hidden = true;
        plot.rest();
      }
    };
    for (const plot of plots) {
      const area = plot.figure.querySelector(".plot");
      area.addEventListener("pointermove", (event) => {
        const box = area.getBoundingClientRect();
        if (plot.size) {
          const rank = Math.floor(((event.clientY - box.top) / box.height) * plot.size);
          heatmaps.forEach((heatmap) => { heatmap.rank = Math.min(plot.size - 1, Math.max(0, rank)); });
        }
        show((event.clientX - box.left) / box.width, plot);
      });
      area.addEventListener("pointerleave", rest);
      area.addEventListener("blur", rest);
      area.addEventListener("keydown", (event) => {
        const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!way) return;
        event.preventDefault();
        show(place + way / 100, plot);
      });
    }
  };

  const all = (kind) => [...document.querySelectorAll(kind)];
  const charts = all(".chart").map((figure, i) => new Chart(figure, values.charts[i], iterations));
  const heatmaps = all(".heatmap").map((figure, i) => new HeatMap(figure, values.heatmaps[i]));
  connect([...charts, ...heatmaps], iterations);
  if (values.search) {
    const rates = axis(values.search.across, (x) => `learning rate ${shown(x)}`, true);
    connect([new Chart(document.querySelector(".search"), values.search, rates)], rates);
  }
  document.documentElement.dataset.ready = "yes";
})();
