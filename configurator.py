"""
Configuration for the scripts, as in nanoGPT: plain module-level variables, overridden by a Python file and by
--key=value.

    python sample.py config/sample_smollm2_cpu.py --window=512 --start="Once upon a time"
    python sample.py --help

A script opens with one block of variables, each followed by a comment that gives its unit and legal values,
then calls `configure(globals())`, then imports what is heavy. The default tells the type; where it cannot, an
annotation does (`window: int | None = 4096`). It ends in `if __name__ == "__main__": run(main)`.

A fork imports a script and changes a part of it. Its own variables are keys beside those of the script; one
that the script has too is a new default:

    import train_rl
    from configurator import configure, run

    ceiling = 5.0                     # the ratio counts at most this much, > 1

    def token_loss(ratio, advantage): ...

    if __name__ == "__main__":        # python -m forks.ceiling config/rl_passes.py --ceiling=3 --lr=1e-5
        configure(globals(), train_rl)
        train_rl.token_loss = token_loss
        run(train_rl.main)

Kept simple on purpose: no nesting, no environment variables, no merging of lists. Later arguments win.
"""
import ast
import difflib
import inspect
import json
import os
import sys
import tokenize
import types

PLAIN = (bool, int, float, str, list, tuple, dict, type(None))


def configure(module, base=None):
    """Override the variables in `module`, the globals() of a script, from the command line. Does nothing
    unless the script is run directly, so that its functions can be imported. A wrong key, type or file ends
    the program with one line and exit code 2.

    base: of a fork, the script that it imports. The keys of the fork are then also set in the script, which
    writes them to its logs and compares them when it resumes."""
    if module["__name__"] != "__main__":
        return
    script = module if base is None else vars(base)
    own = _keys(module)
    script.update({key: module[key] for key in own})
    hints = {}
    for name in (script["__name__"], "__main__"):
        hints |= inspect.get_annotations(sys.modules[name])
    script.setdefault("debug", False)
    keys = _keys(script)
    types_of = {key: hints.get(key, object if script[key] is None else type(script[key])) for key in keys}

    for arg in sys.argv[1:]:
        if arg in ("--help", "-h"):
            run(lambda: _print_help(script, [script, module], keys))  # run(), for when `| head` has enough
            sys.exit(0)
        elif arg.startswith("--"):
            key, equals, text = arg[2:].partition("=")
            _known(key, keys, arg)
            if not equals:
                _fail(f"{arg}: a value is missing, write --{key}=VALUE (now {script[key]!r})")
            script[key] = _typed(key, _parse(text, types_of[key]), types_of[key], arg)
        elif arg.startswith("-"):
            _fail(f"{arg}: arguments are a config file or --key=value; --help lists the keys")
        else:
            for key, value in _read_file(arg, {key: script[key] for key in keys}).items():
                _known(key, keys, f"{arg}: {key}")
                script[key] = _typed(key, value, types_of[key], f"{arg}: {key} = {value!r}")
    module.update({key: script[key] for key in own})


def settings(module, without=()):
    """The configuration among the globals() of a script, as JSON would give it back."""
    found = {key: module[key] for key in _keys(module) if key not in without}
    return json.loads(json.dumps(found))


def require(keys, *rules):
    """ValueError for the first rule (key, whether its value is right, what would be right) that does not
    hold. keys: the globals() of a script."""
    for key, right, what in rules:
        if not right:
            raise ValueError(f"{key}={keys[key]!r}: must be {what}")


def run(main):
    """Call main(). Bad input (ValueError, or a file that cannot be opened) becomes one line on standard
    error and exit code 2, an interrupt exit code 130; --debug=True shows the traceback instead."""
    sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        main()
    except BrokenPipeError:
        # Whoever read the output, such as head, has seen enough. Nothing can be written, at exit neither.
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


def _keys(module):
    """The names of the configuration among some globals(): lower-case plain data."""
    names = [key for key in module if key.islower() and not key.startswith("_")]
    return [key for key in names if isinstance(module[key], PLAIN)]


def _known(key, keys, source):
    if key not in keys:
        near = difflib.get_close_matches(key, keys, 1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else ""
        _fail(f"{source}: there is no key {key!r}{hint} --help lists the keys")


def _parse(text, wanted):
    """A string key takes the text as it is (it may contain '=' or look like a number); the others a Python
    literal."""
    if wanted is str:
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _typed(key, value, wanted, source):
    """`value` if it has the type that `key` wants (ints pass for floats, lists for tuples), else the
    program ends."""
    options = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
    for option in options:
        if option is float and type(value) is int or option is tuple and type(value) is list:
            return option(value)
        if isinstance(value, option) and (not isinstance(value, bool) or option in (bool, object)):
            return value
    names = " or ".join("None" if option is type(None) else option.__name__ for option in options)
    hint = ": write True or False" if bool in options else ""
    _fail(f"{source}: {key} wants {names}, not {type(value).__name__}{hint}")


def _read_file(path, settings):
    """The variables that a config file sets. It may read the settings that stand so far, import modules,
    and use names that begin with an underscore for itself."""
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
    except Exception as error:  # the file is anybody's Python: whatever it raises is a fault of the file
        _fail(f"config file {path}: {type(error).__name__}: {error}")
    tools = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)
    changed = {}
    for key, value in names.items():
        is_new = key not in settings or value is not settings[key]
        if is_new and not key.startswith("_") and not isinstance(value, tools):
            changed[key] = value
    return changed


def _print_help(script, modules, keys):
    """Every key with its value and the comment that follows it in the source."""
    comments = {"debug": "show the traceback of an error"}
    for module in modules:
        comments |= _comments(module["__file__"], keys)
    print((modules[-1].get("__doc__") or "").strip() + "\n\nkeys:")
    for key in keys:
        print(f"  --{key}={script[key]!r}".ljust(40) + f" {comments.get(key, '')}", flush=True)


def _comments(path, keys):
    """The comment on the line, not indented, on which a file first names each of the keys."""
    comments, key_of_line = {}, {}
    with open(path, "rb") as file:
        for token in tokenize.tokenize(file.readline):
            line, column = token.start
            if token.type == tokenize.NAME and column == 0 and token.string in keys:
                key_of_line[line] = token.string
            elif token.type == tokenize.COMMENT and line in key_of_line:
                comments.setdefault(key_of_line[line], token.string.lstrip("# "))
    return comments
