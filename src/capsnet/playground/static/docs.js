// The API's documentation, made from openapi.json.

import { get, say } from "./api.js";
import { showTheme } from "./theme.js";

const examples = {
  "/api/predict": { weights: "mnist", image: { test: 0 } },
  "/api/route": { weights: "mnist", image: { test: 0 } },
  "/api/reconstruct": { weights: "mnist", class: 7, capsule: Array(16).fill(0.2) },
  "/api/perturb": { weights: "mnist", class: 7, capsule: Array(16).fill(0.2), dimensions: [0], offsets: [-0.1, 0, 0.1] },
  "/api/segment": { weights: "multimnist", digits: [{ image: { test: 0 }, right: -3 }, { image: { test: 2 }, right: 3 }] },
};

function element(tag, text, className) {
  return Object.assign(document.createElement(tag), { textContent: text ?? "", className: className ?? "" });
}

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map(typeOf).join(" or ");
  if (schema.type === "array") return `list of ${typeOf(schema.items)}`;
  return schema.type ?? "any";
}

function fieldsOf(title, schema) {
  const box = element("details");
  box.append(element("summary", title));
  const list = element("ul");
  for (const [name, field] of Object.entries(schema.properties ?? {})) {
    const item = element("li");
    const must = (schema.required ?? []).includes(name) ? "" : " (optional)";
    item.append(element("code", name), ` ${typeOf(field)}${must}${field.description ? `: ${field.description}` : ""}`);
    list.append(item);
  }
  box.append(list);
  return box;
}

async function show() {
  const api = await get("/openapi.json");
  document.getElementById("about").textContent = `${api.info.description} Every mistake in a request is answered by a status of 4xx and {"error": "one sentence"}.`;
  const host = document.getElementById("operations");
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const card = element("section", "", "card");
      card.append(element("h2", `${method.toUpperCase()} ${path}`), element("p", operation.description ?? ""));
      if (examples[path]) {
        const command = `curl -H 'Content-Type: application/json' ${location.origin}${path} -d '${JSON.stringify(examples[path])}'`;
        card.append(element("pre", command, "example"));
      }
      const body = operation.requestBody?.content?.["application/json"]?.schema;
      const answer = operation.responses?.["200"]?.content?.["application/json"]?.schema;
      for (const [title, schema] of [["request", body], ["answer", answer]]) {
        if (schema?.$ref) card.append(fieldsOf(`${title}: ${typeOf(schema)}`, api.components.schemas[typeOf(schema)]));
      }
      host.append(card);
    }
  }
  const types = element("section", "", "card");
  types.append(element("h2", "Types"));
  for (const [name, schema] of Object.entries(api.components.schemas)) {
    if (schema.properties) types.append(fieldsOf(`${name}: ${schema.description ?? ""}`, schema));
  }
  host.append(types);
}

showTheme();
show().catch((error) => say(error.message));
