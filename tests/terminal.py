"""terminal.py COLUMNS STEPS COMMAND...: the command in a terminal of that width; its exit status. Of the list
STEPS bytes are typed, other texts and so many bytes are waited for; what came before a text that begins with !
goes to standard output, what is left at the end to standard error."""
import fcntl
import os
import pty
import struct
import sys
import termios

pid, fd = pty.fork()
if pid == 0:
    fcntl.ioctl(1, termios.TIOCSWINSZ, struct.pack("4H", 24, int(sys.argv[1]), 0, 0))
    os.execv(sys.argv[3], sys.argv[3:])
seen = b""
for step in eval(sys.argv[2]):
    if isinstance(step, bytes):
        os.write(fd, step)
        continue
    mark = b"" if isinstance(step, int) else step.lstrip("!").encode()
    while len(seen) < step if not mark else mark not in seen:
        seen += os.read(fd, 4096)
    if mark:
        before, seen = seen.split(mark, 1)
        if step[0] == "!":
            sys.stdout.buffer.write(before.replace(b"\r\n", b"\n") + b"\n")
while True:
    sys.stderr.buffer.write(seen)
    try: seen = os.read(fd, 4096)
    except OSError: break
    if not seen: break
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
