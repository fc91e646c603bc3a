import sys

from services.prefill.main import main

if __name__ == "__main__":  # the engine process imports this module again
    sys.exit(main())
