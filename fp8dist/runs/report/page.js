// Runs when the plots are there. Bokeh passes: figures; and with slots sources, boxes, renderers, slot, about, start, width.
const dark = window.matchMedia("(prefers-color-scheme: dark)")

function paint(night) {
  const ink = night ? "#e8e8e8" : "#1f1f1f", faint = night ? "#4a4a4a" : "#d8d8d8"
  for (const figure of figures) {
    for (const part of [...figure.above, ...figure.below, ...figure.left, ...figure.right, ...figure.center]) {
      for (const name of Object.keys(part.properties)) {
        if (name.endsWith("_text_color") && !name.startsWith("group")) part[name] = ink
        if (/^(axis|major_tick|minor_tick)_line_color$/.test(name)) part[name] = ink
        if (name == "grid_line_color") part[name] = faint
        if (name == "background_fill_color") part[name] = null
      }
    }
  }
}
paint(dark.matches)
dark.addEventListener("change", () => paint(dark.matches))
window.addEventListener("beforeprint", () => paint(false))
window.addEventListener("afterprint", () => paint(dark.matches))

const choice = document.getElementById("slot")
if (choice) {
  const names = about.data

  function row(i) {
    const data = sources[names.roles[i]].data, bins = data.amax[0].shape[1], first = names.places[i] * bins
    const take = (name) => Array.from({length: bins}, (_, k) => Number(data[name][0][first + k]))
    const step = take("amax").map((_, k) => start + k * width)
    const amax = take("amax"), scale = take("scale")
    const edge = (value) => scale.map((one) => value / one)
    const held = (name) => take(name).map((one) => (one < 0 ? NaN : one))
    const jump = take("jump").map((one, k) => (one >= 2 ? scale[k] : NaN))
    const ends = amax.filter((one) => one > 0 && one < Infinity), top = edge(names.largest[i])
    const bad = amax.map((one) => (one == Infinity ? Math.max(...ends, ...top.filter((t) => t > 0), 1e-30) : NaN))
    return {
      step, scale, jump, bad, top, amax: amax.map((one) => (one > 0 && one < Infinity ? one : NaN)),
      normal: edge(names.normal[i]), subnormal: edge(names.subnormal[i]),
      rank: held("rank"), microbatch: held("microbatch"), underflow: take("underflow"), saturated: take("saturated"),
    }
  }

  function show() {
    const i = Number(choice.value), found = row(i)
    const {underflow, saturated, ...drawn} = found
    slot.data = drawn
    for (const [role, box] of Object.entries(boxes)) {
      box.visible = role == names.roles[i]
      box.top = names.places[i]
      box.bottom = names.places[i] + 1
    }
    const most = (values) => values.reduce((a, b) => (b > a ? b : a), -Infinity)
    const percent = (values) => (most(values) >= 0 ? (100 * most(values)).toPrecision(3) + " %" : "not measured")
    const count = (values) => values.filter((one) => !isNaN(one)).length
    document.getElementById("slot-name").textContent = names.names[i]
    document.getElementById("slot-facts").textContent =
      `Format ${names.formats[i] || "not known (run.json lists it)"}. Largest underflow ${percent(underflow)}, ` +
      `largest saturation ${percent(saturated)}. ${count(found.jump)} jumps of the scale by a factor of 2 or more. ` +
      `${count(found.bad)} places where an amax is not finite.`
  }

  function select(quantity) {
    for (const [name, parts] of Object.entries(renderers)) for (const part of parts) part.visible = name == quantity
    for (const one of document.querySelectorAll("[data-quantity]")) one.hidden = one.dataset.quantity != quantity
  }

  choice.addEventListener("change", show)
  for (const radio of document.getElementsByName("quantity")) {
    radio.addEventListener("change", () => select(radio.value))
  }
  show()
}
document.documentElement.dataset.ready = "yes"
