// dependencies = ["ai@5.0.277", "@ai-sdk/openai@2.0.131", "zod@4.6.7"]
// Vercel's AI SDK 5 on its default API (responses, store = true): tool steps and a second user turn, which name items by their ids.
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { writeFileSync } from "node:fs";
import { z } from "zod";

const tools = {
  write_answer: tool({
    description: "Writes answer.txt.",
    inputSchema: z.object({ text: z.string() }),
    execute: async ({ text }) => {
      writeFileSync("answer.txt", text);
      return "written";
    },
  }),
};
const ask = (messages) => generateText({ model: openai("gpt-5"), tools, messages, stopWhen: stepCountIs(5) });
const messages = [{ role: "user", content: process.argv[2] }];
messages.push(...(await ask(messages)).response.messages, { role: "user", content: "Is it there?" });
console.log((await ask(messages)).text);
