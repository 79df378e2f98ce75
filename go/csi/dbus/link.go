package dbus

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
)

// Socket is csid's private socket.
const Socket = "/run/csid/csid.sock"

const (
	name      = "org.csid1"
	root      = "/org/csid1"
	manager   = "org.csid1.Manager"
	plugin    = "org.csid1.Plugin"
	systemBus = "system-bus"

	bus          = "org.freedesktop.DBus"
	ownerChanged = "NameOwnerChanged"
)

// dbus-daemon drops the 129th unanswered call of a connection. Some places are reserved for calls that never wait, so that an operation
// can be cancelled while all others hang.
const (
	waitingCalls = 112
	shortCalls   = 12
)

// link is one connection to one csid, or to csid's bus.
type link struct {
	conn           *dbus.Conn
	onBus          bool
	waiting, short chan struct{}
	// Guarded by Client.mu. A forgotten link is closed when its last user is done.
	users     int
	forgotten bool
}

// bell is called at each of csid's events, and at each start of csid on the bus.
type bell func()

func (ring bell) DeliverSignal(iface, member string, signal *dbus.Signal) {
	// Every peer on the bus can send these signals: they are only hints to read events.
	if iface == manager && member == "Event" || iface == bus && member == ownerChanged && hasOwner(signal) {
		ring()
	}
}

// hasOwner returns whether csid's name has an owner. A call to csid without one would start csid.
func hasOwner(changed *dbus.Signal) bool {
	var of, before, owner string
	return dbus.Store(changed.Body, &of, &before, &owner) == nil && of == name && owner != ""
}

// connect tries the private socket, then the system bus. An address that was given has no fallback: another csid must not
// answer. The end of ctx ends the try, and closes the connection.
func connect(ctx context.Context, address string, ring bell) (*link, error) {
	made := func(conn *dbus.Conn, onBus bool) *link {
		return &link{
			conn:    conn,
			onBus:   onBus,
			waiting: make(chan struct{}, waitingCalls),
			short:   make(chan struct{}, shortCalls),
		}
	}
	var failed error
	if address != systemBus {
		path := address
		if path == "" {
			path = Socket
		}
		conn, err := dialSocket(ctx, path, ring)
		if err == nil {
			return made(conn, false), nil
		}
		failed = fmt.Errorf("%s: %w", path, err)
	}
	if address == systemBus || address == "" {
		conn, err := dialBus(ctx, ring)
		if err == nil {
			return made(conn, true), nil
		}
		failed = errors.Join(failed, fmt.Errorf("system bus: %w", err))
	}
	return nil, lost("cannot reach csid: " + failed.Error())
}

// dialSocket connects to the private socket. A peer-to-peer connection has no Hello.
func dialSocket(ctx context.Context, path string, ring bell) (*dbus.Conn, error) {
	conn, err := dbus.Dial("unix:path="+dbus.EscapeBusAddressValue(path), dbus.WithSignalHandler(ring), dbus.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	if err := conn.Auth([]dbus.Auth{dbus.AuthExternal(strconv.Itoa(os.Geteuid()))}); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func dialBus(ctx context.Context, ring bell) (*dbus.Conn, error) {
	conn, err := dbus.ConnectSystemBus(dbus.WithSignalHandler(ring), dbus.WithContext(ctx))
	if err != nil {
		return nil, err
	}
	events := []dbus.MatchOption{dbus.WithMatchSender(name), dbus.WithMatchInterface(manager), dbus.WithMatchMember("Event")}
	starts := []dbus.MatchOption{
		dbus.WithMatchSender(bus), dbus.WithMatchInterface(bus), dbus.WithMatchMember(ownerChanged), dbus.WithMatchArg(0, name),
	}
	for _, match := range [][]dbus.MatchOption{events, starts} {
		if err := conn.AddMatchSignal(match...); err != nil {
			conn.Close()
			return nil, err
		}
	}
	return conn, nil
}

// dialing is a connection attempt that several callers may wait for.
type dialing struct {
	done chan struct{}
	err  error
}

// use returns the current link, or a new one if the last one is gone. The caller returns it by done.
func (c *Client) use(ctx context.Context) (*link, error) {
	for {
		c.mu.Lock()
		if c.afterlife.Err() != nil {
			c.mu.Unlock()
			return nil, csi.Closed()
		}
		if c.current != nil && c.current.conn.Connected() {
			c.current.users++
			defer c.mu.Unlock()
			return c.current, nil
		}
		c.drop(c.current)
		d := c.dialing
		if d == nil {
			d = &dialing{done: make(chan struct{})}
			c.dialing = d
			// In its own goroutine: a csid that hangs delays the dial, and not the callers.
			go c.dial(d)
		}
		c.mu.Unlock()
		select {
		case <-d.done:
			if d.err != nil {
				return nil, d.err
			}
		case <-ctx.Done():
			return nil, csi.Ended(ctx.Err())
		}
	}
}

func (c *Client) dial(d *dialing) {
	// A csid that hangs holds up the handshake, and the end of the client ends that.
	link, err := connect(c.afterlife, c.address, c.ring)
	c.mu.Lock()
	defer c.mu.Unlock()
	defer close(d.done)
	c.dialing = nil
	d.err = err
	switch {
	case err != nil:
	case c.afterlife.Err() != nil:
		link.conn.Close()
	default:
		c.current = link
		c.links[link] = true
	}
}

// done returns a link. A lost link is not used again.
func (c *Client) done(l *link, isLost bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	l.users--
	if isLost {
		c.drop(l)
	}
	c.reap(l)
}

// drop stops using a link. nil: it does nothing.
func (c *Client) drop(l *link) {
	if l == nil {
		return
	}
	if c.current == l {
		c.current = nil
	}
	l.forgotten = true
	c.reap(l)
}

func (c *Client) reap(l *link) {
	if l.forgotten && l.users == 0 && c.links[l] {
		c.end(l)
	}
}

// end closes a link. Close waits for a message that is being written, and so for a csid that hangs.
func (c *Client) end(l *link) {
	delete(c.links, l)
	go l.conn.Close()
}
