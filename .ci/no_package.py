"""What pip reads when somebody says `pip install .` here (see pyproject.toml)."""
raise SystemExit("nanoslide is a folder of scripts, as nanoGPT is, and no package: run `make demo` in it, "
                 "or pip install -r requirements.txt and put the folder on PYTHONPATH")
