# The Python side of a context. The agent starts it with one end of a socket as descriptor CONTROL and sends requests,
# one at a time; each is answered with one message, and the results that code shows meanwhile go before it. It is the
# protocol of docs/contexts.md but for the encoding: a message is a marshalled (version 2) tuple, because marshal is part
# of the interpreter, runs no Python code and is short, which counts right after a fork, when every instruction is emulated
# for the first time. A request has its own length as first element, a reply comes after its length, 4 bytes big-endian.
# Works with Python 3.8 and newer.
#
# User code runs in a module of its own, registered as __main__. What it finds of the driver is display() among the
# builtins, a finder in sys.meta_path and sys._getframe. Beyond what the interpreter itself has loaded only traceback and
# linecache are imported. RICH is the source of rich.py, which is compiled when a value is more than its repr.


def driver(RICH):
    import builtins
    import linecache
    import marshal
    import sys
    import traceback
    from _ast import Expr, Expression
    from _io import FileIO, TextIOWrapper
    from _signal import SIGINT, signal
    from _thread import get_ident
    from os import _exit, environ, read, register_at_fork, set_inheritable, write
    from os import close as close_fd
    from time import sleep

    CONTROL = 3
    MAX_SOURCES = 16 << 20
    ONLY_AST = 0x400
    TOP_LEVEL_AWAIT = 0x2000
    COROUTINE = 0x80
    HERE = driver.__code__.co_filename
    modules = sys.modules

    set_inheritable(CONTROL, False)
    main = type(sys)("__main__")
    namespace = main.__dict__
    namespace["__builtins__"] = builtins
    modules["__main__"] = main
    sys.argv = [""]
    # Matplotlib would look for a screen, and try one toolkit after the other.
    environ.setdefault("MPLBACKEND", "agg")

    # user: user code runs, so SIGINT is its KeyboardInterrupt. pending: SIGINT came just outside of that. child: this
    # is a fork made by user code, in which nobody listens.
    user = pending = child = False
    flags = TOP_LEVEL_AWAIT
    sources = {}
    sources_size = 0
    loop = None
    held = b""
    busy = False  # an evaluation runs, so the agent listens
    waiting = []  # results of other threads
    main_thread = get_ident()
    rich = None  # see RICH
    # The types whose values are nothing but their repr.
    plain = {
        int,
        float,
        complex,
        bool,
        str,
        bytes,
        bytearray,
        list,
        tuple,
        dict,
        set,
        frozenset,
        range,
        type,
        type(sys),
        type(main.__repr__),
    }
    # The heads of short replies.
    heads = [n.to_bytes(4, "big") for n in range(1024)]
    # The memory of numpy's global generator, between facts and whatever runs next.
    twister = None

    def unread(fd):
        import fcntl

        FIONREAD = 0x541B
        return fcntl.ioctl(fd, FIONREAD, b"0000") != b"\0\0\0\0"

    def settle(fd):
        # Waits until the agent has taken what is in a pipe, but not long: its reader may have other things to do.
        try:
            for pause in (0, 0.0001, 0.0002, 0.0004, 0.0008, 0.002, 0.005, 0.01, 0.02, 0.04):
                if pause:
                    sleep(pause)
                if not unread(fd):
                    return
        except Exception:  # not a pipe any more, or no fcntl in this Python
            pass

    class Errors(FileIO):
        # Standard error, in order with standard output though they are two pipes: whoever writes here waits until the
        # agent has taken what was printed before, and then until it has taken this. Only this stream pays for it.
        def write(self, data):
            if child:
                return FileIO.write(self, data)
            try:
                stdout.flush()
            except Exception:
                pass
            settle(1)
            size = n = FileIO.write(self, data)
            while n is not None and size < len(data):  # a signal came in between
                n = FileIO.write(self, data[size:])
                size += n or 0
            settle(2)
            return size

    class ErrorText(TextIOWrapper):
        def write(self, text):
            nonlocal unwritten
            unwritten = True
            return TextIOWrapper.write(self, text)

    # Line by line, as at a prompt; the encoding must not depend on the image's locale.
    stdout = sys.stdout
    stdout.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stderr = ErrorText(Errors(2, "w", False), encoding="utf-8", errors="backslashreplace", line_buffering=True)
    stderr.mode = "w"
    sys.stderr = sys.__stderr__ = stderr
    unwritten = False  # stderr may have a line that is not complete

    def on_sigint(signum, frame):
        nonlocal pending
        if user:
            raise KeyboardInterrupt
        pending = True

    def in_child():
        nonlocal child
        child = True
        try:
            close_fd(CONTROL)
        except OSError:
            pass

    def receive():
        nonlocal held
        data = held or read(CONTROL, 65536)
        while True:
            try:
                message = marshal.loads(data)
                break
            except EOFError:  # not yet all of it
                more = read(CONTROL, 1 << 20)
                if not more:
                    _exit(0)
                data += more
        held = b""
        if message[0] != len(data):
            # A second request comes with the first only when that was given up.
            held = data[message[0] :]
        return message

    def send(message):
        data = marshal.dumps(message, 2)
        n = len(data)
        if n < 1024:
            data = heads[n] + data
        else:
            data = n.to_bytes(4, "big") + data
        n = write(CONTROL, data)
        while n < len(data):
            data = data[n:]
            n = write(CONTROL, data)

    def load():
        nonlocal rich
        if rich is None:
            space = {"__name__": "forkd", "__builtins__": driver.__globals__["__builtins__"]}
            exec(compile(RICH, HERE, "exec"), space)
            rich = space["rich"](emit, report, plain)
        return rich

    def emit(data, extra, is_main, omitted):
        # Sends a result, in order with what is printed: after what was printed before, and it returns when the agent has
        # it. An interrupt meanwhile waits, so that no message is torn.
        nonlocal user
        if child:  # nobody listens
            stdout.write(data.get("text", "") + "\n")
            return
        result = (-1, (data, extra, is_main, omitted))
        if get_ident() != main_thread or not busy:
            if len(waiting) < 64:
                waiting.append(result)
            return
        flush()
        before, user = user, False
        try:
            send(result)
            while True:
                if receive()[1] == "ack":
                    break
        finally:
            user = before
        if pending and user:
            raise KeyboardInterrupt

    def report(error):
        # An exception of code that was to show a value: said, and no more.
        try:
            stderr.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        except Exception:
            pass

    def display(*values, **options):
        """Show values as a notebook does: in every representation that they have."""
        return load().display(*values, **options)

    display.__module__, display.__qualname__ = "builtins", "display"
    builtins.display = display

    class Finder:
        # Looks out for modules whose programs expect a notebook.
        def find_spec(self, name, path=None, target=None):
            if name not in hooked or name in modules:
                return None
            return load().find(self, name, path, target)

        def invalidate_caches(self):
            pass

    hooked = {
        "matplotlib.pyplot",
        "matplotlib.axes._axes",
        "IPython",
        "IPython.display",
        "IPython.core.display",
        "IPython.core.display_functions",
    }
    sys.meta_path.insert(0, Finder())

    def clip(text, limit=1 << 20):
        if len(text) > limit:
            text = "%s… [%d more characters cut]" % (text[:limit], len(text) - limit)
        return text

    def remember(name, code, simple):
        nonlocal sources_size
        lines = [code] if simple else code.splitlines(True)
        linecache.cache[name] = (len(code), None, lines, name)
        sources[name] = len(code)
        sources_size += len(code)
        while sources_size > MAX_SOURCES and len(sources) > 1:
            oldest = next(iter(sources))
            sources_size -= sources.pop(oldest)
            linecache.cache.pop(oldest, None)

    def execute(code, name, simple):
        # Returns the text of a trailing expression. Simple: the agent thinks that the code is nothing but one, which
        # spares the detour through a syntax tree.
        nonlocal flags
        if simple:
            try:
                compiled = compile(code, name, "eval", flags)
            except SyntaxError:
                pass
            else:
                return show(run(compiled))
        tree = compile(code, name, "exec", ONLY_AST | flags)
        body = tree.body
        last = body.pop() if body and isinstance(body[-1], Expr) else None
        if body:
            compiled = compile(tree, name, "exec", flags)
            if "__future__" in modules:
                # As at a prompt, a future statement holds for all that is entered after it.
                features = modules["__future__"]
                for feature in features.all_feature_names:
                    flags |= compiled.co_flags & getattr(features, feature).compiler_flag
            run(compiled)
        if last is None:
            return None
        return show(run(compile(Expression(last.value), name, "eval", flags)))

    def show(value):
        if value is None:
            return None
        # As sys.displayhook does: an old _ must not be shown by the repr of a value that refers to it.
        builtins._ = None
        text = repr(value) if type(value) in plain else load().represent(value)
        builtins._ = value
        return None if text is None else clip(text)

    def run(code):
        if code.co_flags & COROUTINE:
            return run_async(eval(code, namespace))
        return eval(code, namespace)

    def run_async(coroutine):
        nonlocal loop
        import asyncio

        if loop is None or loop.is_closed():
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        task = loop.create_task(coroutine)
        try:
            return loop.run_until_complete(task)
        except BaseException:
            # An interrupt leaves the loop, not the task.
            if not task.done():
                task.cancel()
                try:
                    loop.run_until_complete(task)
                except BaseException:
                    pass
            raise

    def ours(tb):
        frame = tb.tb_frame
        return frame.f_code.co_filename == HERE or str(frame.f_globals.get("__name__")).startswith("asyncio.")

    def describe(error):
        kind = type(error)
        tb = error.__traceback__
        # Ours and the event loop's lead to user code; the signal handler's is the last of an interrupt.
        while tb is not None and ours(tb):
            tb = tb.tb_next
        last = tb
        while last is not None and last.tb_next is not None:
            if last.tb_next.tb_frame.f_code is on_sigint.__code__:
                last.tb_next = None
            last = last.tb_next
        error.__traceback__ = tb
        sys.last_type, sys.last_value, sys.last_traceback = kind, error, tb
        sys.last_exc = error
        try:
            value = str(error)
        except Exception:
            value = "<unprintable %s object>" % kind.__name__
        try:
            text = "".join(traceback.format_exception(kind, error, tb))
        except Exception:
            text = "%s: %s\n" % (kind.__name__, value)
        return kind.__name__, clip(value, 1 << 16), clip(text)

    def flush():
        nonlocal unwritten
        try:
            stdout.flush()
            if unwritten:
                unwritten = False
                stderr.flush()
            if sys.stdout is not stdout:
                sys.stdout.flush()
            if sys.stderr is not stderr:
                sys.stderr.flush()
        except Exception:  # closed, or not a file at all
            pass

    def evaluate(name, code, simple, env):
        nonlocal user, busy, pending, twister
        twister = text = error = before = None
        busy = True
        try:
            try:
                if env:
                    before = {k: environ.get(k) for k in env}
                    environ.update(env)
                remember(name, code, simple)
                user = True
                if pending:
                    raise KeyboardInterrupt
                text = execute(code, name, simple)
            finally:
                try:
                    # Still interruptible: a reader that does not read holds it back.
                    if rich is not None:
                        rich.finish()
                    flush()
                finally:
                    user = False
        except BaseException as e:
            user = False
            error = describe(e)
            flush()
            if child:
                leave(e)
        if before:
            for k, v in before.items():
                if v is None:
                    environ.pop(k, None)
                else:
                    environ[k] = v
        while waiting:
            result = waiting.pop(0)
            if not child:
                send(result)
        pending = busy = False
        return text, error

    def leave(error):
        # A fork made by user code ends as a program would.
        code = getattr(error, "code", 1) if isinstance(error, SystemExit) else 1
        if code is None:
            code = 0
        elif not isinstance(code, int):
            stderr.write("%s\n" % (code,))
            code = 1
        if not isinstance(error, SystemExit):
            stderr.write("".join(traceback.format_exception(type(error), error, error.__traceback__)))
        flush()
        _exit(code & 0xFF)

    def renew(number, state, seed, env):
        # The first thing that runs in a clone: no imports, no system calls but what ssl needs.
        done, failed = [], []
        if env:
            for k in env:
                environ[k] = env[k]
        random = modules.get("random")
        if random is not None:
            try:
                # What random.seed comes to for an integer.
                modules["_random"].Random.seed(random._inst, number)
                random._inst.gauss_next = None
                done.append("random")
            except Exception as e:  # still being imported, or somebody else's module of that name
                failed.append(("random", repr(e)))
        mtrand = modules.get("numpy.random.mtrand")
        if mtrand is not None:
            try:
                if twister is not None:
                    twister.raw = state
                else:
                    # Not seed: that takes 32 bits, or twice as much code for more.
                    key = modules["numpy"].frombuffer(state, "u4", 624)
                    mtrand._rand.set_state(("MT19937", key, 624))
                done.append("numpy.random")
            except Exception as e:
                failed.append(("numpy.random", repr(e)))
        ssl = modules.get("_ssl")
        if ssl is not None:
            try:
                ssl.RAND_add(seed, 32.0)
                done.append("openssl")
            except Exception as e:
                failed.append(("openssl", repr(e)))
        tempfile = modules.get("tempfile")
        if tempfile is not None:
            tempfile._name_sequence = None
            done.append("tempfile")
        return tuple(done), tuple(failed)

    def find_twister(mtrand):
        # numpy's set_state is 800 blocks of code that a clone would translate anew, to copy 624 words and set three
        # variables. Where the state is, and looks, as in every numpy so far, the clone can copy it itself: key, then
        # position. Nothing else may run before it does.
        ctypes = modules.get("ctypes")
        if ctypes is None or len(sys._current_frames()) > 1:
            return None
        try:
            kind, key, position, gauss, _ = mtrand._rand.get_state()
            memory = (ctypes.c_char * 2500).from_address(mtrand._rand._bit_generator.ctypes.state_address)
            if kind != "MT19937" or gauss or memory.raw != key.tobytes() + position.to_bytes(4, sys.byteorder):
                return None
            return memory
        except Exception:
            return None

    def facts(search):
        # Before a freeze: what a clone cannot renew. To search is to count a reference to every object, which makes the
        # whole heap the machine's own memory: not for the source of a branch.
        nonlocal twister
        found = {}
        random, mtrand = modules.get("random"), modules.get("numpy.random.mtrand")
        generator = modules.get("numpy.random._generator")
        kinds, known = [], []
        if random is not None:
            kinds.append(random.Random)
            known.append(getattr(random, "_inst", None))
        twister = None
        if mtrand is not None:
            twister = find_twister(mtrand)
            plain.update(k for k in vars(modules["numpy"]).values() if isinstance(k, type) and issubclass(k, modules["numpy"].generic))
            plain.add(modules["numpy"].ndarray)
            kinds.append(mtrand.RandomState)
            known.append(getattr(mtrand, "_rand", None))
        if generator is not None:
            kinds.append(generator.Generator)
        if kinds and search:
            import gc

            kinds = tuple(kinds)
            system = getattr(random, "SystemRandom", ())
            names = getattr(modules.get("tempfile"), "_name_sequence", None)
            known.append(getattr(names, "_rng", None))
            everything = gc.get_objects()
            # Hundreds of thousands of objects, but few types: those first.
            types = {k for k in set(map(type, everything)) if issubclass(k, kinds) and not issubclass(k, system)}
            for o in [o for o in everything if type(o) in types]:
                if not any(o is k for k in known):
                    name = type(o).__module__ + "." + type(o).__qualname__
                    found[name] = found.get(name, 0) + 1
        ssl = modules.get("_ssl")
        if ssl is not None and search:
            # OpenSSL sets up its generator at first use, which takes long; not in a clone, please.
            ssl.RAND_add(b"forkd", 0.0)
        children = 0
        mp = modules.get("multiprocessing.process")
        if mp is not None:
            children = len(getattr(mp, "_children", ()))
        return len(sys._current_frames()), children, found, sys.flags.hash_randomization

    def serve():
        nonlocal pending
        _, op, sequence, args = receive()
        if op == "ack":  # of a result whose sender was interrupted
            return
        if op == "eval":
            name, code, simple, env, late = args
            if late:
                pending = False  # SIGINT may have been meant for the evaluation before
            reply = evaluate(name, code, simple, env)
        elif op == "renew":
            reply = renew(*args)
        else:
            reply = facts(*args)
        if child:
            flush()
            _exit(0)
        send((sequence, reply))

    signal(SIGINT, on_sigint)
    register_at_fork(after_in_child=in_child)
    send((0, "%d.%d.%d" % sys.version_info[:3]))
    while True:
        serve()
