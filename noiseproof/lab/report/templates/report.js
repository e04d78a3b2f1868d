"use strict";
// Text from outside is set only with textContent, so that a class name is never read as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (id) => document.getElementById(id);
  const percent = (share, digits = 0) => (100 * share).toFixed(digits);

  const make = (name, { text, kind, title, style } = {}, ...children) => {
    const node = document.createElement(name);
    if (text !== undefined) node.textContent = text;
    if (kind) node.className = kind;
    if (title) node.title = title;
    for (const [key, value] of Object.entries(style || {})) node.style.setProperty(key, value);
    node.append(...children);
    return node;
  };
  const dot = (i, style = {}) =>
    make("i", { kind: `dot s${data.shapes[i]}`, style: { "--c": `var(--c${i})`, ...style } });

  // Light and dark: as the system is set, until the button is pressed.
  const root = document.documentElement;
  const store = (value) => {
    try {
      if (value) localStorage.setItem("noiseproof-theme", value);
      return localStorage.getItem("noiseproof-theme");
    } catch {
      return null; // a page opened from disk may have no storage
    }
  };
  const stored = store();
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  find("theme").addEventListener("click", () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    store(root.dataset.theme);
  });

  // Folded parts are printed, also by browsers that cannot unfold them by style alone.
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((d) => (d.open = true)));

  // A click on a header sorts the table, numbers from the highest; a second click reverses the order.
  const value = (row, i) => {
    const raw = row.cells[i].dataset.value;
    const number = Number(raw);
    return raw !== "" && Number.isFinite(number) ? number : raw || "";
  };
  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, i) => {
      head.addEventListener("click", () => {
        const body = table.tBodies[0];
        const first = i === 0 ? "ascending" : "descending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        for (const h of heads) h.setAttribute("aria-sort", h === head ? order : "none");
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...body.rows].sort((a, b) => {
          const [x, y] = [value(a, i), value(b, i)];
          if (x === "" || y === "") return (x === "") - (y === ""); // missing values last
          if (typeof x === "number" && typeof y === "number") return sign * (x - y);
          return sign * String(x).localeCompare(String(y));
        });
        body.append(...rows);
      });
    });
  }

  // Class by class.
  const classes = data.breakdown;
  const drawRecall = (condition) => {
    const box = find("recall");
    const rows = condition.shown.flatMap((c, i) => {
      const name = classes.classes[c];
      const track = make("div");
      classes.labels.forEach((label, m) => {
        const share = condition.recall[m] && condition.recall[m][i];
        if (share === null || share === undefined) return;
        const spot = dot(m, { left: `${100 * share}%` });
        spot.title = `${label}: ${percent(share, 1)} % of ${name}`;
        track.append(spot);
      });
      const many = classes.images ? ` (${classes.images[c]} images)` : "";
      return [make("span", { text: name, title: name + many }), track];
    });
    const axis = make("div", { kind: "axis" });
    for (const tick of [0, 25, 50, 75, 100]) {
      axis.append(make("span", { text: tick === 100 ? "100 %" : tick, style: { left: `${tick}%` } }));
    }
    box.replaceChildren(...rows, make("span"), axis);
    const means = classes.labels.map((label, m) => {
      const known = (condition.recall[m] || []).filter((v) => v !== null);
      const mean = known.reduce((a, b) => a + b, 0) / known.length;
      return known.length ? `${label} ${percent(mean, 1)} %` : `${label} unknown`;
    });
    box.setAttribute("aria-label", `Recall of each class at ${condition.title}; mean over these classes: ${means.join(", ")}`);
  };
  const drawConfusion = (condition, m) => {
    find("confused-label").textContent = `${classes.labels[m]}, ${condition.title}`;
    const matrix = condition.matrix[m];
    const pairs = condition.pairs[m];
    find("confusion-hint").hidden = !matrix;
    if (!matrix) {
      const items = (pairs || []).map(([i, j, share]) =>
        make("li", {},
          make("span", { text: `${classes.classes[i]} as ${classes.classes[j]}` }),
          make("b", { text: `${percent(share, 1)} %` })));
      const none = make("p", { kind: "hint", text: pairs ? "No errors." : "Not evaluated." });
      find("confusion").replaceChildren(items.length ? make("ul", { kind: "pairs" }, ...items) : none);
      return;
    }
    const head = make("tr", {}, make("th"),
      ...classes.classes.map((name) => make("th", { text: name, title: name })));
    const rows = matrix.map((row, i) => {
      const total = row.reduce((a, b) => a + b, 0);
      return make("tr", {}, make("th", { text: classes.classes[i], title: classes.classes[i] }),
        ...row.map((count, j) => {
          const share = total ? count / total : 0;
          const strength = i === j ? 85 * share : 100 * Math.min(1, 1.6 * share);
          return make("td", {
            text: share >= 0.005 ? percent(share) : "",
            kind: strength > 60 ? "full" : "",
            title: `${classes.classes[i]} predicted as ${classes.classes[j]}: ${percent(share, 1)} %`,
            style: { "--v": strength.toFixed(1), "--hue": i === j ? "var(--right)" : "var(--wrong)" },
          });
        }));
    });
    find("confusion").replaceChildren(
      make("table", { kind: "matrix" }, make("thead", {}, head), make("tbody", {}, ...rows)));
  };
  if (classes) {
    const draw = () => {
      const condition = classes.conditions[find("condition").value];
      drawRecall(condition);
      drawConfusion(condition, Number(find("subject").value));
    };
    find("condition").addEventListener("change", draw);
    find("subject").addEventListener("change", draw);
    draw();
  }

  // Gallery: one slider for all images, with the noise of the evaluation's first draw.
  const gallery = data.gallery;
  if (gallery) {
    const slider = find("level");
    const select = find("family");
    const family = () => gallery.families[select ? select.value : 0];
    const line = (i, m) => {
      const says = make("span", { kind: "says" });
      const sure = make("span", { kind: "sure" });
      const kept = make("small", { text: gallery.tolerance[i][m] });
      const item = make("li", { style: { "--c": `var(--c${m})` } }, dot(m),
        make("span", { kind: "name", text: gallery.labels[m], title: gallery.labels[m] }), says, sure, kept);
      const show = ([c, p]) => {
        const right = c === gallery.truth[i];
        item.className = right ? "right" : "wrong";
        says.textContent = `${right ? "✓" : "✗"} ${gallery.classes[c]}`;
        says.title = gallery.classes[c];
        sure.textContent = `${percent(p)} %`;
        sure.style.setProperty("--p", 100 * p);
      };
      return { item, show };
    };
    const cards = gallery.truth.map((truth, i) => {
      const name = gallery.classes[truth];
      const image = make("img");
      const lines = gallery.labels.map((_, m) => line(i, m));
      const caption = make("div", {}, make("b", { text: name }), gallery.reasons[i]);
      const card = make("article", { kind: "card" }, make("header", {}, image, caption),
        make("ul", {}, ...lines.map((l) => l.item)));
      return { card, image, lines, name };
    });
    find("cards").replaceChildren(...cards.map((c) => c.card));
    const draw = () => {
      const level = gallery.levels[family().levels[slider.value]];
      find("level-name").textContent = level.title;
      slider.setAttribute("aria-valuetext", level.title);
      cards.forEach(({ image, lines, name }, i) => {
        image.src = level.images[i];
        image.alt = `A test image of class ${name}, ${level.title}`;
        lines.forEach((l, m) => l.show(level.predictions[i][m]));
      });
      find("scores").replaceChildren(...gallery.labels.map((label, m) => {
        const mean = level.accuracy[m];
        const text = mean === null ? "–" : `${percent(mean, 1)} %`;
        return make("li", {}, dot(m), label, make("b", { text }));
      }));
    };
    const reset = () => {
      const last = family().levels.length - 1;
      slider.max = last;
      slider.disabled = last === 0;
      slider.value = Math.ceil(last / 2);
      draw();
    };
    slider.addEventListener("input", draw);
    if (select) select.addEventListener("change", reset);
    reset();
  }
})();
