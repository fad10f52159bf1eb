// The map in the app: its data is fetched from this server once, and the camera stays where it was.
export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".atlas"), memory = (globalThis.icebearAtlas ??= {});
  if (memory.url !== data.url) {
    Object.assign(memory, {url: data.url, packed: fetch(data.url).then((answer) => answer.json())});
    memory.packed.catch(() => { memory.url = ""; });  // to try again when the map is shown again
  }
  const app = {
    memory,
    card: (...side) => setTriggerValue("card", side),
    take: (...rows) => setTriggerValue("taken", rows),
  };
  root.map ??= memory.packed.then((packed) => atlas(root, packed, app));
  root.map.then((map) => {
    const lit = JSON.stringify(data.lit);
    if (root.dataset.lit !== lit) map.light(data.lit);
    if (memory.lit !== lit) map.all();
    root.dataset.lit = memory.lit = lit;
  });
}
