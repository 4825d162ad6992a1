/* The parts of a request's time: their names, their colours, and bars made of them. */

import { el, svg } from "./dom.js";
import { duration } from "./format.js";

const UNITS = 1000;
const SLIVER = 4;
/* Minimum width in UNITS, so that every part is visible. */

/* Colour groups, in the order of the legend. */
const FAMILIES = [
  ["wait", "waiting"],
  ["router", "router"],
  ["kv", "KV transfer"],
  ["prefill", "prefill"],
  ["front", "front end and bus"],
  ["failed", "failed attempts"],
  ["decode", "decode"],
];

const PARTS = {
  admission: ["wait", "admission"],
  tokenize: ["router", "tokenize"],
  place: ["router", "place"],
  failed: ["failed", "failed attempts"],
  queue: ["wait", "queue"],
  fetch: ["kv", "fetch KV"],
  prefill: ["prefill", "prefill"],
  handoff: ["kv", "handoff"],
  decode_queue: ["wait", "decode queue"],
  decode_prefill: ["prefill", "decode prefill"],
  front_end_and_bus: ["front", "front end and bus"],
  decode: ["decode", "decode"],
};

/** Colour group and label of a part; unknown parts use the label that the collector sent. */
export function describe(part) {
  const [family, label] = PARTS[part.name] ?? ["front", part.name];
  return { family, label: part.label ?? label };
}

/** The items of a legend. */
export function legendItems() {
  return FAMILIES.map(([family, label]) => el("li", { class: `key part-${family}` }, label));
}

/** The sum of the parts, seconds. */
export function totalOf(parts) {
  return parts.reduce((sum, part) => sum + part.seconds, 0);
}

/** A bar of `wholeS` seconds with the parts in sequence, starting at `fromS`. */
export function partsBar(parts, wholeS, fromS = 0) {
  const bar = svg("svg", { viewBox: `0 0 ${UNITS} 10`, preserveAspectRatio: "none", class: "parts", "aria-hidden": "true" });
  let at = fromS;
  for (const part of parts) {
    if (part.seconds > 0 && wholeS > 0) {
      const x = Math.min((at / wholeS) * UNITS, UNITS - SLIVER);
      const width = Math.min(Math.max((part.seconds / wholeS) * UNITS, SLIVER), UNITS - x);
      const { family, label } = describe(part);
      const tooltip = svg("title", {}, `${label} ${duration(part.seconds)}`);
      bar.append(svg("rect", { x, y: 0, width, height: 10, class: `part-${family}` }, tooltip));
    }
    at += part.seconds;
  }
  return bar;
}
