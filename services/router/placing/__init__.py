"""Placing: workers for one attempt of a request, chosen and charged in one place, whichever process asks."""
