"""The decode service: takes requests from routers, gets their prompts computed, generates. Life of a request:

1. `rpc`     a router's Submit arrives on its stream; what can never fit is refused at once.
2. `report`  the engine matches its own cache and says what it holds (no candidates or an aggregated worker: it just runs).
3. `claim`   decides on that: run here, or hand the prompt to a prefill worker.
4. `join`    opens a hand-off in the session to that worker (`peers`, `session`) and tells the engine what is announced.
5. `emit`    forwards the first token the moment it arrives, while blocks are still being pulled.
6. `join`    says Pulled once every read is done, and lets the engine use what was read only after Confirmed.
7. `emit`    forwards each step's tokens and closes the request with exactly one terminal output.

A cancel, the end of the router's stream, or a failure at any step ends the request at the engine and at the prefill worker.
"""
