"""``python -m pipeline``."""

from pipeline.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
