// The routes of the server, read from /openapi.json: method, path, what it does, and the fields of its body.

const byId = (id) => document.getElementById(id);

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function resolved(schema, api) {
  const name = schema?.$ref?.split("/").pop();
  return name ? api.components.schemas[name] : schema ?? {};
}

/* A type in a few characters: "string | null", "list of objects". */
function typeName(schema, api) {
  const shape = resolved(schema, api);
  if (shape.anyOf) return [...new Set(shape.anyOf.map((option) => typeName(option, api)))].join(" | ");
  if (shape.enum) return shape.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (shape.const !== undefined) return JSON.stringify(shape.const);
  if (shape.type === "array") return `list of ${typeName(shape.items, api)}`;
  return shape.type ?? "any";
}

function fieldTable(fields, heading) {
  const table = element("table");
  const head = table.createTHead().insertRow();
  for (const title of [heading, "type", ""]) head.append(element("th", "", title));
  const body = table.createTBody();
  for (const field of fields) {
    const row = body.insertRow();
    for (const text of [field.name, field.type, field.note]) row.append(element("td", "", text));
  }
  return table;
}

function bodyFields(operation, api) {
  const schema = resolved(operation.requestBody?.content?.["application/json"]?.schema, api);
  const required = schema.required ?? [];
  return Object.entries(schema.properties ?? {}).map(([name, property]) => ({
    name, type: typeName(property, api),
    note: [required.includes(name) ? "required" : "", property.description ?? ""].filter(Boolean).join("; "),
  }));
}

function parameterFields(operation, api) {
  return (operation.parameters ?? []).map((parameter) => ({
    name: parameter.name, type: typeName(parameter.schema, api), note: parameter.in,
  }));
}

function routeElement(method, path, operation, api) {
  const details = element("details");
  const summary = element("summary");
  summary.append(element("span", "method", method.toUpperCase()), element("span", "path", path));
  summary.append(element("span", "quiet", ` ${operation.description ?? ""}`));
  const body = element("div", "body");
  const parameters = parameterFields(operation, api);
  const fields = bodyFields(operation, api);
  if (parameters.length) body.append(fieldTable(parameters, "parameter"));
  if (fields.length) body.append(fieldTable(fields, "field of the body"));
  if (!parameters.length && !fields.length) body.append(element("p", "quiet", "It takes no body."));
  details.append(summary, body);
  return details;
}

function show(api) {
  byId("status").textContent = "";
  byId("access").hidden = true;
  const routes = Object.entries(api.paths).flatMap(([path, operations]) =>
    Object.entries(operations).map(([method, operation]) => routeElement(method, path, operation, api)));
  byId("routes").replaceChildren(...routes);
}

async function load() {
  const key = byId("key").value;
  const response = await fetch("/openapi.json", { headers: key ? { Authorization: `Bearer ${key}` } : {} });
  if (response.ok) return show(await response.json());
  byId("access").hidden = response.status !== 401;
  byId("status").textContent = response.status === 401
    ? "This server wants an API key." : `The server returned status ${response.status}.`;
}

byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  load();
});
load();
