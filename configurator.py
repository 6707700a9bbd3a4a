"""
Configuration for the scripts, as in nanoGPT: plain module-level variables, overridden by a Python file and by --key=value.

    python sample.py config/sample_smollm2_cpu.py --window=512 --start="Once upon a time"
    python sample.py --help

A script opens with one block of variables, each followed by a comment that gives its unit and legal values, then calls
`configure(globals())`, then imports what is heavy. The default tells the type; where it cannot, an annotation does
(`window: int | None = 4096`). It ends in `if __name__ == "__main__": run(main)`.

Kept simple on purpose: no nesting, no environment variables, no merging of lists. Later arguments win over earlier ones.
"""
import ast
import difflib
import inspect
import json
import os
import re
import sys
import tokenize
import types

PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


def configure(script):
    """Override the variables in `script` (its globals()) from the command line. Does nothing unless the script is run directly,
    so that its functions can be imported. A wrong key, type or file ends the program with one line and exit code 2."""
    if script["__name__"] != "__main__":
        return
    script.setdefault("debug", False)
    keys = [key for key, value in script.items() if not key.startswith("_") and isinstance(value, PLAIN)]
    hints = inspect.get_annotations(sys.modules["__main__"])
    kinds = {key: hints.get(key, object if script[key] is None else type(script[key])) for key in keys}
    for arg in sys.argv[1:]:
        if arg in ("--help", "-h"):
            run(lambda: _print_help(script, keys))                                    # which knows what to do when `| head` has enough
            sys.exit(0)
        elif arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            _known(key, keys, arg)
            if not equals:
                _fail(f"{arg}: a value is missing, write --{key}=VALUE (now {script[key]!r})")
            script[key] = _typed(key, _parse(text, kinds[key]), kinds[key], arg)
        elif arg.startswith("-"):
            _fail(f"{arg}: arguments are a config file or --key=value; --help lists the keys")
        else:
            for key, value in _read_file(arg, {key: script[key] for key in keys}).items():
                _known(key, keys, f"{arg}: {key}")
                script[key] = _typed(key, value, kinds[key], f"{arg}: {key} = {value!r}")


def settings(keys, without=()):
    """The configuration among the globals() of a script, as JSON would give it back: what is lower-case and plain data."""
    return json.loads(json.dumps({key: value for key, value in keys.items() if key.islower() and key[0] != "_" and key not in without
                                  and isinstance(value, PLAIN)}))


def require(keys, *rules):
    """ValueError for the first rule (key, whether its value is right, what would be right) that does not hold. keys: the globals()."""
    for key, right, what in rules:
        if not right:
            raise ValueError(f"{key}={keys[key]!r}: must be {what}")


def run(main):
    """Call main(). Bad input (ValueError, or a file that cannot be opened) becomes one line on standard error and exit code 2, an
    interrupt exit code 130; --debug=True shows the traceback instead."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        main()
    except BrokenPipeError:  # whoever read the output, such as head, has seen enough; nothing more can be written, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError) as error:
        if main.__globals__.get("debug"):
            raise
        named = isinstance(error, OSError) and error.filename
        _fail(f"{error.filename!r}: {error.strerror}" if named else error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def _fail(message):
    print("error: " + " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)


def _known(key, keys, where):
    if key not in keys:
        near = difflib.get_close_matches(key, keys, 1, cutoff=0.5)
        _fail(f"{where}: there is no key {key!r}" + (f", did you mean {near[0]!r}?" if near else "") + " --help lists the keys")


def _parse(text, kind):
    """A string key takes the text as it is (it may contain '=' or look like a number); the others take a Python literal."""
    if kind is str:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _typed(key, value, kind, where):
    """`value` if it is of the kind that `key` has (ints pass for floats, lists for tuples), else the end of the program."""
    kinds = kind.__args__ if isinstance(kind, types.UnionType) else (kind,)
    for want in kinds:
        if want is float and type(value) is int or want is tuple and type(value) is list:
            return want(value)
        if isinstance(value, want) and (not isinstance(value, bool) or want in (bool, object)):
            return value
    names = " or ".join("None" if want is type(None) else want.__name__ for want in kinds)
    _fail(f"{where}: {key} wants {names}, not {type(value).__name__}" + (": write True or False" if bool in kinds else ""))


def _read_file(path, settings):
    """The variables that a config file sets. It may read the settings that stand so far, import modules, and use names that
    begin with an underscore for itself."""
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
    except OSError as error:
        _fail(f"config file {path}: {error.strerror}")
    except UnicodeDecodeError:
        _fail(f"config file {path}: not a text file in utf-8")
    names = dict(settings)
    try:
        exec(compile(source, path, "exec"), names)
    except Exception as error:  # the file is anybody's Python: whatever it raises is a fault of the file, to be named as such
        _fail(f"config file {path}: {type(error).__name__}: {error}")
    tools = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    return {key: value for key, value in names.items() if not key.startswith("_") and not isinstance(value, tools)
            and (key not in settings or value is not settings[key])}


def _print_help(script, keys):
    """Every key with its default and the comment that follows it in the source."""
    print((script.get("__doc__") or "").strip() + "\n\nkeys:")
    comments, line_key = {}, {}
    with open(script["__file__"], "rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME and token.start[1] == 0 and token.string in keys:
                line_key.setdefault(token.start[0], token.string)
            elif token.type == tokenize.COMMENT and token.start[0] in line_key:
                comments.setdefault(line_key[token.start[0]], re.sub(r"^#\s*", "", token.string))
    comments.setdefault("debug", "show the traceback of an error")
    for key in keys:
        print(f"  --{key}={script[key]!r}".ljust(40) + f" {comments.get(key, '')}", flush=True)
