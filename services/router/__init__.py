"""The router: OpenAI's HTTP API in front, worker sessions behind. No torch. The life of a request:

 1. `http/`      finds the API key, reads the body, refuses what is unknown, unsupported or out of range by field name.
 2. `text/`      renders the chat template and tokenises; the prompt is token ids from here on.
 3. `admission/` charges the key, and lets the request wait in fair order while workers have no room.
 4. `view/`      turns the prompt into per-worker hits, from the workers' cache events, and adds their load: a snapshot.
 5. `schedule/`  chooses from the snapshot, purely: Local(D) or Remote(D, ordered prefill candidates), with its reason.
 6. `view/`      is charged with the choice at once, so that a burst does not pile up on one worker.
 7. `dispatch/`  submits to D on its one session stream and hands every step's tokens to the request's bounded buffer.
 8. `generation` takes what has come in, detokenises it, looks for stop strings (a match cancels upstream).
 9. `http/`      writes it as JSON or server-sent events; a client that leaves cancels at D at once.

4 to 6 are one call, `placing/`, so that they happen in one place however many processes have HTTP (`processes/`). `admin/` is the
gRPC admin API, for operators.

The requests of a worker that is lost, or that makes no steps any more, go on at another one (`dispatch.recovery`), at most
twice. Cache events and loads are hints: D's own match decides what is really computed, the view only predicts.

`main` builds all objects from `config`; nothing is global.
"""
