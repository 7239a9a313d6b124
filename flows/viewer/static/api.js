// Requests to the server of this page, below the address with its token.

const enc = encodeURIComponent;
export const link = (run, ...parts) => `#/run/${[run, ...parts].map(enc).join("/")}`;
export const outputLink = (run, ref) => link(run, "output", ref.iteration, ref.stage, ref.step);

// An error of the server, or of its being away, as text.
export class Problem extends Error {}

async function answer(path, signal) {
  let response;
  try {
    response = await fetch(`api/${path}`, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("the server does not answer: `metaloom view` has ended, or is busy");
  }
  if (response.ok) return response;
  const body = await response.text();
  try {
    throw new Problem(JSON.parse(body).problem);
  } catch (error) {
    throw error instanceof Problem ? error : new Problem(`${response.status}: ${body.slice(0, 300)}`);
  }
}

export async function get(parts, query = {}, signal = undefined) {
  const asked = new URLSearchParams(query).toString();
  return (await answer(parts.map(enc).join("/") + (asked ? `?${asked}` : ""), signal)).json();
}

// [rows, columns] of an array as float64, with how many entries one stands for.
export async function values(run, ref, query, signal) {
  const path = ["run", run, "values", ref.iteration, ref.stage, ref.step].map(enc).join("/");
  const response = await answer(`${path}?${new URLSearchParams(query)}`, signal);
  const [rows, columns] = response.headers.get("X-Shape").split(",").map(Number);
  const every = response.headers.get("X-Every").split(",").map(Number);
  const flat = new Float64Array(await response.arrayBuffer());
  return { rows: Array.from({ length: rows }, (_, n) => flat.subarray(n * columns, (n + 1) * columns)), every };
}

export async function film(run, ref, query, signal) {
  const path = ["run", run, "film", ref.iteration, ref.stage, ref.step].map(enc).join("/");
  const response = await answer(`${path}?${new URLSearchParams(query)}`, signal);
  const about = (name) => Number(response.headers.get(`X-${name}`));
  const message = JSON.parse(response.headers.get("X-Told"));
  const image = await createImageBitmap(await response.blob());
  return { image, frames: about("Frames"), columns: about("Columns"), every: about("Every"), message };
}
