CREATE OR REPLACE PROCEDURE tpcc_order_status(w INTEGER, d INTEGER, c INTEGER, last_name TEXT)
RETURNS TABLE (
    balance_cents BIGINT, order_number INTEGER, carrier INTEGER, item INTEGER, supplier INTEGER,
    quantity INTEGER, amount_cents BIGINT, delivered TIMESTAMP)
LANGUAGE lua AS $$
    if c == 0 then
        local rows = db.query("SELECT c_id FROM customer WHERE c_w_id = $1 AND c_d_id = $2 AND c_last = $3 \
            ORDER BY c_first", w, d, last_name)
        c = rows[(#rows + 1) // 2].c_id
    end
    local customer = db.query("SELECT c_balance, c_first, c_middle, c_last FROM customer \
        WHERE c_w_id = $1 AND c_d_id = $2 AND c_id = $3", w, d, c)[1]
    local order = db.query("SELECT o_id, o_entry_d, o_carrier_id FROM orders \
        WHERE o_w_id = $1 AND o_d_id = $2 AND o_c_id = $3 ORDER BY o_id DESC LIMIT 1", w, d, c)[1]
    local lines = db.query("SELECT ol_i_id, ol_supply_w_id, ol_quantity, ol_amount, ol_delivery_d \
        FROM order_line WHERE ol_w_id = $1 AND ol_d_id = $2 AND ol_o_id = $3", w, d, order.o_id)
    local answer = {}
    for i, line in lines do
        answer[i] = {
            balance_cents = customer.c_balance, order_number = order.o_id, carrier = order.o_carrier_id,
            item = line.ol_i_id, supplier = line.ol_supply_w_id, quantity = line.ol_quantity,
            amount_cents = line.ol_amount, delivered = line.ol_delivery_d,
        }
    end
    return answer
$$
