// Requests to the server, and messages when one fails.

const message = document.getElementById("message");

export async function get(path) {
  return answer(await fetch(path));
}

export async function post(path, body) {
  return answer(await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  }));
}

async function answer(response) {
  const content = await response.json();
  if (!response.ok) throw new Error(content.error ?? `the server answered ${response.status}`);
  return content;
}

export function say(text) {
  message.textContent = text;
  message.hidden = !text;
}

/** Asks one question at a time; while it waits, only the newest further question is kept. */
export class Latest {
  #busy = false;
  #next = null;

  constructor(path) {
    this.path = path;
  }

  async ask(body, use) {
    if (this.#busy) {
      this.#next = [body, use];
      return;
    }
    this.#busy = true;
    try {
      const content = await post(this.path, body);
      say("");
      use(content);
    } catch (error) {
      say(error instanceof TypeError ? "The server does not answer; is capsnet serve still running?" : error.message);
    }
    this.#busy = false;
    if (this.#next) {
      const [nextBody, nextUse] = this.#next;
      this.#next = null;
      this.ask(nextBody, nextUse);
    }
  }
}
