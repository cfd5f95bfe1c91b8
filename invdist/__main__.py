"""`python -m invdist COMMAND ...` is `invdist COMMAND ...`."""

from invdist.cli.main import main

raise SystemExit(main())
