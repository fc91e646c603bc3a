"""View: facts about workers, kept from their records, loads and cache events. Hints, never correctness."""
