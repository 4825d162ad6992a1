/* Workers and flows in words: the same for cards, lines, captions, panels and those who hear the page. */

import { counted, duration, inBytes, percent, rate } from "./format.js";

/** Workers say something every second; of one that has not for so long, it is told. */
export const SILENT_S = 3;

/** A worker's state. */
export function workerSentence(worker) {
  const silent = worker.heard_s_ago > SILENT_S ? `, not heard for ${duration(worker.heard_s_ago)}` : "";
  const work = worker.role === "store" ? "" : `, ${counted(worker.running)} running, ${counted(worker.waiting)} waiting`;
  return `${worker.id}: ${worker.role}, ${worker.phase}${silent}${work}, KV ${percent(worker.kv_used)} full`;
}

/** What goes from one to the other. */
export function flowSentence(flow) {
  const ends = `${flow.from} → ${flow.to}`;
  if (flow.kind === "kv") return `${ends}: KV, ${inBytes(flow.bytes_per_s)}/s, ${rate(flow.tokens_per_s)} tokens/s`;
  return `${ends}: ${rate(flow.per_s)} requests/s, ${rate(flow.tokens_per_s)} prompt tokens/s`;
}

/** The flows of one worker, the largest first. */
export function flowsOf(flows, id) {
  const its = flows.filter((flow) => flow.from === id || flow.to === id);
  return its.sort((one, other) => other.tokens_per_s - one.tokens_per_s);
}
