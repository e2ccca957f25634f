// dependencies = ["@mastra/core@0.24.9", "@ai-sdk/openai@2.0.131", "zod@3.25.76"]
// Mastra on the AI SDK's default API: tool steps and a second user turn.
import { openai } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { writeFileSync } from "node:fs";
import { z } from "zod";

const write = createTool({
  id: "write_answer",
  description: "Writes answer.txt.",
  inputSchema: z.object({ text: z.string() }),
  execute: async ({ context }) => {
    writeFileSync("answer.txt", context.text);
    return "written";
  },
});
const agent = new Agent({ name: "writer", instructions: "You write files.", model: openai("gpt-5"), tools: { write_answer: write } });
const messages = [{ role: "user", content: process.argv[2] }];
const first = await agent.generate(messages);
messages.push(...first.response.messages, { role: "user", content: "Is it there?" });
console.log((await agent.generate(messages)).text);
