"""Serves the files of a machine by the SFTP protocol, without SSH. The arguments are the port and the path of
sftp-server, which is started for each connection."""

from __future__ import annotations

import socketserver
import subprocess
import sys


class Connection(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        subprocess.run([sys.argv[2]], check=False, stdin=self.request, stdout=self.request)


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True


with Server(("", int(sys.argv[1])), Connection) as server:
    server.serve_forever()
