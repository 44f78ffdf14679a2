import sys

from pilotfish.cli import main

if __name__ == "__main__":
    sys.exit(main())
