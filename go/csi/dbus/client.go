// Package dbus implements [csi.Client] over D-Bus in pure Go, also for programs that are built with CGO_ENABLED=0.
package dbus

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/godbus/dbus/v5"

	"github.com/csid-project/csid/go/csi"
	"github.com/csid-project/csid/go/internal/row"
)

// lastWords is the time that a closing client has to send its cancellations.
const lastWords = time.Second

// Client is a connection to csid that outlives csid's restarts. It owns one D-Bus connection, and nothing else.
type Client struct {
	address string
	// The part of the operation ID that all operations of this client share.
	prefix string
	count  atomic.Uint64

	// life ends with Close, afterlife when the last cancellations are sent.
	life, afterlife context.Context
	die, bury       context.CancelFunc
	talking         sync.WaitGroup

	mu      sync.Mutex
	current *link
	dialing *dialing
	links   map[*link]bool
	readers map[*reader]bool
}

var _ csi.Client = (*Client)(nil)

// Open connects to csid. Later calls wait for a csid that restarts. address is the path of csid's private socket or "system-bus".
// Empty: $CSID_SOCKET, else the socket at its usual place, else the system bus. The error is csi.ErrDisconnected if csid cannot be
// reached now. The package builds on every system; where csid does not run, on all but Linux, it is csi.ErrNotSupported.
func Open(ctx context.Context, address string) (*Client, error) {
	if err := supported(); err != nil {
		return nil, err
	}
	if address == "" {
		address = os.Getenv("CSID_SOCKET")
	}
	c := &Client{
		address: address,
		prefix:  "go-" + rand.Text(),
		links:   map[*link]bool{},
		readers: map[*reader]bool{},
	}
	c.life, c.die = context.WithCancel(context.Background())
	c.afterlife, c.bury = context.WithCancel(context.Background())
	link, err := c.use(ctx)
	if err != nil {
		c.Close()
		return nil, callerError(err)
	}
	c.done(link, false)
	return c, nil
}

// Close closes the connection. Running calls end here with csi.ErrDisconnected and go on in csid. It may take a second, while
// cancellations are sent.
func (c *Client) Close() error {
	c.mu.Lock()
	c.die()
	c.mu.Unlock()
	said := make(chan struct{})
	go func() {
		c.talking.Wait()
		close(said)
	}()
	select {
	case <-said:
	case <-time.After(lastWords):
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bury()
	for link := range c.links {
		c.end(link)
	}
	return nil
}

// ring wakes the readers that wait for events.
func (c *Client) ring() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for reader := range c.readers {
		reader.wake()
	}
}

func (c *Client) operation() string { return fmt.Sprintf("%s-%d", c.prefix, c.count.Add(1)) }

// call calls a method of the Manager.
func (c *Client) call(ctx context.Context, member string, v csi.Volume, o options, names []string, args ...any) (values, error) {
	return c.ask(ctx, request{path: root, iface: manager, member: member, args: args, options: o, volume: v, names: names})
}

// list returns rows of the Manager.
func (c *Client) list(ctx context.Context, member string, filter options) ([]row.Row, error) {
	r := request{path: root, iface: manager, member: member, names: []string{"rows"}}
	r.args = []any{map[string]dbus.Variant(filter)}
	body, err := c.ask(ctx, r)
	return body.Rows("rows"), err
}

// properties reads an object's properties of one interface.
func (c *Client) properties(ctx context.Context, path, iface string) (values, error) {
	body, err := c.ask(ctx, getAll(path, iface))
	return properties(body), err
}

func getAll(path, iface string) request {
	return request{path: path, iface: "org.freedesktop.DBus.Properties", member: "GetAll", args: []any{iface}, short: true}
}

// pluginPath returns the path of a plugin's object. The ID is escaped as sd_bus_path_encode does: every byte except letters and digits,
// and a leading digit, becomes _ and two hex digits.
func pluginPath(id string) string {
	var path strings.Builder
	path.WriteString(root + "/plugin/")
	if id == "" {
		path.WriteByte('_')
	}
	for i := range len(id) {
		b := id[i]
		switch {
		case b >= 'a' && b <= 'z', b >= 'A' && b <= 'Z', i > 0 && b >= '0' && b <= '9':
			path.WriteByte(b)
		default:
			fmt.Fprintf(&path, "_%02x", b)
		}
	}
	return path.String()
}
