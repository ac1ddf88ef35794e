// Page of the HTTP contract: every path with its fields, as /openapi.json describes them.

import { $, element, on, token, told } from "./base.js";

let models = {};

/** Return a schema, or the model that it refers to. */
function found(schema) {
  return "$ref" in schema ? models[schema.$ref.split("/").pop()] : schema;
}

/** Write what a schema takes in words. */
function words(given) {
  const schema = found(given);
  const union = schema.properties ? undefined : (schema.anyOf ?? schema.oneOf);
  if (union) return [...new Set(union.map(words))].join(" or ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.type === "array") return `list of ${words(schema.items ?? {})}`;
  if (schema.type === "object" && schema.properties) {
    return `object (${Object.entries(schema.properties)
      .map(([name, each]) => `${name}: ${words(each)}`)
      .join("; ")})`;
  }
  const bounds = "minimum" in schema ? ` ${schema.minimum} to ${schema.maximum}` : "";
  return (schema.type ?? "any value") + bounds;
}

function fields(given) {
  const schema = found(given);
  const rows = Object.entries(schema.properties ?? {}).map(([name, each]) => {
    const told = each.description ?? "";
    const kind = [schema.required?.includes(name) ? "required" : "", words(each), told];
    return element(
      "tr",
      {},
      element("td", {}, element("code", {}, name)),
      element("td", {}, kind.filter(Boolean).join(", ").replace(/ or null/, "")),
    );
  });
  return rows.length ? [element("table", {}, ...rows)] : [];
}

function section(path, method, operation) {
  const answer = Object.entries(operation.responses["200"].content)[0];
  const body = operation.requestBody?.content["application/json"].schema;
  const shown = fields(answer[1].schema);
  return element(
    "section",
    {},
    element("h2", {}, element("code", {}, `${method.toUpperCase()} ${path}`)),
    element("p", {}, operation.summary),
    ...(body ? fields(body) : []),
    element("p", { class: "hint" }, `It answers with ${answer[0]}${shown.length ? ":" : "."}`),
    ...shown,
  );
}

async function show() {
  try {
    const described = await told("/openapi.json");
    models = described.components.schemas;
    $("version").textContent = described.info.version;
    $("state").textContent = "Paths of this gateway, with the fields that each takes.";
    $("state").className = "";
    $("login").hidden = true;
    const paths = Object.entries(described.paths).flatMap(([path, methods]) =>
      Object.entries(methods).map(([method, operation]) => section(path, method, operation)),
    );
    $("paths").replaceChildren(...paths);
  } catch (error) {
    $("login").hidden = error.status !== 401;
    $("state").textContent = error.message;
    $("state").className = "bad";
  }
}

on("login", "submit", () => {
  token.value = $("token").value;
  sessionStorage.setItem("token", token.value);
  show();
});
show();
