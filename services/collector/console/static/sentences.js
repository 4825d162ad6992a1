/* Sentences about workers and flows, shared by cards, lines, captions, panels and screen readers. */

import { counted, duration, inBytes, percent, rate } from "./format.js";

/** Workers report every second; a longer silence is shown. */
export const SILENT_S = 3;

/** A worker's state in one sentence. */
export function workerSentence(worker) {
  const silent = worker.heard_s_ago > SILENT_S ? `, no report for ${duration(worker.heard_s_ago)}` : "";
  const work = worker.role === "store" ? "" : `, ${counted(worker.running)} running, ${counted(worker.waiting)} waiting`;
  return `${worker.id}: ${worker.role}, ${worker.phase}${silent}${work}, KV ${percent(worker.kv_used)} full`;
}

/** A flow in one sentence. */
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
