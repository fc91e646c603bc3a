import sys

from services.cli.main import main

if __name__ == "__main__":  # an engine process imports this module again
    sys.exit(main())
