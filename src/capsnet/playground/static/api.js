// Requests to the server, and messages when one fails.

const message = document.getElementById("message");

export async function get(path) {
  return request(path);
}

export async function post(path, body) {
  return request(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

let waiting = 0;

/** Counts the requests on their way in <html data-asking>, absent when all are answered. */
function count(change) {
  waiting += change;
  if (waiting) document.documentElement.dataset.asking = waiting;
  else delete document.documentElement.dataset.asking;
}

async function request(path, options) {
  count(1);
  try {
    return await exchange(path, options);
  } finally {
    count(-1);
  }
}

async function exchange(path, options) {
  const response = await fetch(path, options).catch(() => {
    throw new Error("The server does not answer; is capsnet serve still running?");
  });
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(content.error ?? `the server answered ${response.status}`);
  return content;
}

const messages = new Map();

/** Shows what went wrong for one who asked, until it is called for the same one with "". */
export function say(text, asker = "") {
  messages.delete(asker);
  if (text) messages.set(asker, text);
  message.textContent = [...new Set(messages.values())].join(" ");
  message.hidden = !messages.size;
}

export function hush() {
  for (const asker of messages.keys()) say("", asker);
}

/** Asks one question at a time; while it waits, only the newest further question is kept. */
export class Latest {
  #busy = false;
  #next = null;
  #dropped = 0;

  constructor(path) {
    this.path = path;
  }

  /** Forgets what was asked: answers that are on their way come too late. */
  drop() {
    this.#next = null;
    this.#dropped += 1;
    say("", this);
  }

  async ask(body, use) {
    if (this.#busy) {
      this.#next = [body, use];
      return;
    }
    this.#busy = true;
    const dropped = this.#dropped;
    try {
      const said = await post(this.path, body);
      if (dropped === this.#dropped) {
        use(said);
        say("", this);
      }
    } catch (error) {
      if (dropped === this.#dropped) say(error.message, this);
    }
    this.#busy = false;
    if (this.#next) {
      const [nextBody, nextUse] = this.#next;
      this.#next = null;
      this.ask(nextBody, nextUse);
    }
  }
}
