"use strict";
(function () {
  const root = document.documentElement;
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const plots = Array.from(document.querySelectorAll(".plot"));
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const touch = window.matchMedia("(pointer: coarse), (max-width: 560px)");

  function colors() {
    const style = getComputedStyle(root);
    const get = (name) => style.getPropertyValue(name).trim();
    const look = {
      "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)", "font.color": get("--text"),
      "legend.bgcolor": "rgba(0,0,0,0)", "hoverlabel.bgcolor": get("--panel"), "hoverlabel.bordercolor": get("--line"),
      "hoverlabel.font.color": get("--text"), "modebar.bgcolor": "rgba(0,0,0,0)", "modebar.color": get("--soft"),
      "modebar.activecolor": get("--accent"),
    };
    for (const axis of ["xaxis", "yaxis"]) {
      look[axis + ".gridcolor"] = get("--grid");
      look[axis + ".zerolinecolor"] = get("--line");
      look[axis + ".linecolor"] = get("--line");
    }
    return look;
  }

  function draw(plot) {
    const figure = figures[plot.id];
    // On a touch screen, dragging over a figure scrolls the page instead of zooming.
    figure.layout.dragmode = touch.matches ? false : "zoom";
    const options = {
      responsive: true,
      displaylogo: false,
      displayModeBar: touch.matches ? false : "hover",
      // Listed one by one, because the default set has a button that sends the figure to a server.
      modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    };
    return Plotly.newPlot(plot, figure.data, figure.layout, options).then(() => Plotly.relayout(plot, colors()));
  }

  function repaint() {
    plots.forEach((plot) => Plotly.relayout(plot, colors()));
  }

  const button = document.getElementById("theme");
  function setTheme(theme) {
    root.dataset.theme = theme;
    button.textContent = theme === "dark" ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to the " + button.textContent.toLowerCase() + " theme");
  }
  button.addEventListener("click", () => {
    setTheme(root.dataset.theme === "dark" ? "light" : "dark");
    repaint();
  });
  dark.addEventListener("change", (change) => {
    setTheme(change.matches ? "dark" : "light");
    repaint();
  });
  const asked = new URLSearchParams(location.search).get("theme");
  setTheme(asked === "dark" || asked === "light" ? asked : dark.matches ? "dark" : "light");
  button.hidden = false;

  Promise.all(plots.map(draw)).then(() => { root.dataset.ready = String(plots.length); });
})();
