// Python in the reader's browser: Pyodide imports the package and answers, one question at a time.
import { loadPyodide } from "./pyodide/pyodide.mjs";

try {
  const python = await loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href });
  const sources = await (await fetch("minidist.zip")).arrayBuffer();
  python.unpackArchive(sources, "zip");
  const answer = python.runPython("from minidist.observe.pages.answers import answer_json; answer_json");
  onmessage = ({ data }) => {
    postMessage({ number: data.number, answer: answer(data.question) });
  };
  postMessage({ ready: true });
} catch (error) {
  postMessage({ failed: error.message });
}
