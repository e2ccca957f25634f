// dependencies = ["@openai/agents@0.20.0", "zod@4.6.7"]
// OpenAI Agents SDK for JavaScript: an agent with two tools that hands over to a second one.
import { Agent, run, setTracingDisabled, tool } from "@openai/agents";
import { text } from "node:stream/consumers";
import { z } from "zod";

setTracingDisabled(true);
const question = JSON.parse(await text(process.stdin));

const getWeather = tool({
  name: "get_weather",
  description: "The weather of a city.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
const bookTable = tool({
  name: "book_table",
  description: "Books a table outside.",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    throw new Error(`no table in ${city}`);
  },
});
const host = new Agent({ name: "host", instructions: "You book tables.", tools: [bookTable] });
const planner = Agent.create({ name: "planner", instructions: "You plan evenings.", tools: [getWeather], handoffs: [host] });

const result = await run(planner, question);
console.log(JSON.stringify({ text: result.finalOutput, calls: result.rawResponses.length }));
