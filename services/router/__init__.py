"""The router: OpenAI's HTTP API in front, worker sessions behind. No torch. The life of a request:

 1. `http/`      reads the body, refuses what is unknown, unsupported or out of range by field name.
 2. `text/`      renders the chat template and tokenises; the prompt is token ids from here on.
 3. `view/`      turns the prompt into per-worker hits, from the workers' cache events, and adds their load: a snapshot.
 4. `schedule/`  chooses from the snapshot, purely: Local(D) or Remote(D, ordered prefill candidates), with its reason.
 5. `view/`      is charged with the choice at once, so that a burst does not pile up on one worker.
 6. `dispatch/`  submits to D on its one session stream and hands every step's tokens to the request's bounded buffer.
 7. `generation` takes what has come in, detokenises it, looks for stop strings (a match cancels upstream).
 8. `http/`      writes it as JSON or server-sent events; a client that leaves cancels at D at once.

`admin/` is the gRPC admin API, for operators.

The requests of a worker that is lost, or that makes no steps any more, go on at another one (`dispatch.recovery`), at most
twice. Cache events and loads are hints: D's own match decides what is really computed, the view only predicts.

`main` builds all objects from `config`; nothing is global.
"""
